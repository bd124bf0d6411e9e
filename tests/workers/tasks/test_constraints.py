"""Constrained answers of a model with random weights: only what the constraint allows is said."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import BadSettings

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["river", "garden", "station"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["place", "count", "sure"],
    "additionalProperties": False,
}


def make_tool(name: str, **members: Any) -> str:
    function = {"name": name, "parameters": SCHEMA, **members}
    return json.dumps({"type": "function", "function": function})


TOOLS = [make_tool("go"), make_tool("look", strict=True)]
BY_SCHEMA = pb.Constraint(schema=json.dumps(SCHEMA), strict=True)
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 80}


def calls_of(done: pb.TurnDone) -> list[tuple[str, Any]]:
    """The calls of an answer but for one that the limit has cut."""
    calls = list(done.message.tool_calls)
    if done.finish_reason == "length":
        calls = calls[:-1]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def is_valid(value: Any) -> bool:
    return (
        set(value) == set(SCHEMA["required"])
        and value["place"] in ("river", "garden", "station")
        and 0 <= value["count"] <= 99
        and isinstance(value["sure"], bool)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_json_of_its_schema(
    temperature: float, make_worker: Callable[..., Any]
) -> None:
    worker = make_worker("llama")
    worker.open()
    done = worker.turn(
        "s", "hello", constraint=BY_SCHEMA, **{**SAMPLED, "temperature": temperature}
    )
    assert done.finish_reason == "stop"
    assert is_valid(json.loads(done.message.content))
    assert worker.shown().strip() == done.message.content
    free = worker.turn("s", "hello", **SAMPLED)
    assert not free.message.content.startswith("{")


def test_a_schema_that_is_not_strict_is_honoured_as_far_as_it_can_be(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker("llama")
    worker.open()
    odd = {**SCHEMA, "not": {"type": "string"}}
    loose = pb.Constraint(schema=json.dumps(odd))
    done = worker.turn("s", "hello", constraint=loose, **SAMPLED)
    assert is_valid(json.loads(done.message.content))
    before = worker.memory()
    with pytest.raises(BadSettings, match="not"):
        worker.turn("s", "x", constraint=pb.Constraint(schema=json.dumps(odd), strict=True))
    assert worker.memory() == before, "a refusal changes nothing"


@pytest.mark.parametrize("single", [False, True])
def test_a_required_call_is_of_a_tool_and_its_schema(
    single: bool, make_worker: Callable[..., Any]
) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    wanted = pb.Constraint(tool_choice="required", single_call=single)
    done = worker.turn("s", "hello", constraint=wanted, **{**SAMPLED, "max_tokens": 400})
    calls = calls_of(done)
    assert (done.finish_reason, done.message.content) == ("tool_calls", "")
    assert calls
    assert all(name in ("go", "look") and is_valid(arguments) for name, arguments in calls)
    assert len(calls) == 1 or not single
    made = [e.tool_call for e in worker.events["s"] if e.HasField("tool_call")]
    assert made == list(done.message.tool_calls)
    for index, call in enumerate(made):
        told = [e.arguments for e in worker.events["s"] if e.HasField("arguments")]
        pieces = [piece for piece in told if piece.index == index]
        assert len(pieces) > 5, "told while it is generated"
        assert {(piece.id, piece.name) for piece in pieces} == {(call.id, call.name)}
        assert "".join(piece.arguments for piece in pieces) == call.arguments


def test_a_named_tool_is_called(make_worker: Callable[..., Any]) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    for name in ("go", "look"):
        wanted = pb.Constraint(tool_choice="required", tools=[name], single_call=True)
        done = worker.turn("s", [{"role": "user", "content": "hi"}], constraint=wanted, **SAMPLED)
        assert [called for called, _ in calls_of(done)] == [name]
        worker.turn(
            "s",
            [{"role": "tool", "content": "1", "tool_call_id": done.message.tool_calls[0].id}],
            max_tokens=4,
        )


def test_a_call_that_the_limit_cuts_is_none_until_its_arguments_have_begun(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    wanted = pb.Constraint(tool_choice="required", single_call=True)
    done = worker.turn("s", "hello", constraint=wanted, max_tokens=6)
    assert done.finish_reason == "length"
    assert not done.message.tool_calls
    done = worker.turn("s", "hello", constraint=wanted, **{**SAMPLED, "max_tokens": 30})
    assert (done.finish_reason, done.message.content) == ("length", "")
    (call,) = done.message.tool_calls
    told = [e.arguments.arguments for e in worker.events["s"] if e.HasField("arguments")]
    assert "".join(told) == call.arguments, "what was told of it stays true"
    assert from_json(call.arguments, allow_partial=True).keys() <= SCHEMA["properties"].keys()
    result = {"role": "tool", "content": "cut off", "tool_call_id": call.id}
    assert worker.turn("s", [result], max_tokens=4).output_tokens, "the conversation goes on"


def test_a_call_is_of_a_declared_tool_once_the_model_has_begun_one(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    mark = worker.engine.tokenizer.inner.convert_tokens_to_ids("<tool_call>")
    # A bias makes the model open a call sooner or later; what follows is random but for the grammar.
    done = worker.turn(
        "s", "hello", logit_bias=[pb.TokenBias(id=mark, bias=12.0)], **{**SAMPLED, "seed": 2}
    )
    calls = calls_of(done)
    assert calls
    assert all(name in ("go", "look") and is_valid(arguments) for name, arguments in calls)
    undeclared = worker.open("other") and worker.turn(
        "other", "hello", logit_bias=[pb.TokenBias(id=mark, bias=12.0)], **SAMPLED
    )
    assert not calls_of(undeclared), "without tools nothing is constrained"


def test_without_a_choice_of_tools_no_call_is_begun(make_worker: Callable[..., Any]) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    mark = worker.engine.tokenizer.inner.convert_tokens_to_ids("<tool_call>")
    bias = [pb.TokenBias(id=mark, bias=100.0)]
    done = worker.turn(
        "s", "hello", constraint=pb.Constraint(tool_choice="none"), logit_bias=bias, **SAMPLED
    )
    assert not done.message.tool_calls
    assert mark not in done.token_ids[done.prompt_tokens :]


def test_text_of_a_schema_or_a_call_is_the_models_choice(make_worker: Callable[..., Any]) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    texts, called = 0, 0
    for seed in range(6):
        options = {**SAMPLED, "seed": seed, "max_tokens": 300}
        mark = worker.engine.tokenizer.inner.convert_tokens_to_ids("<tool_call>")
        bias = [pb.TokenBias(id=mark, bias=4.0 * (seed % 2))]
        done = worker.turn("s", f"say {seed}", constraint=BY_SCHEMA, logit_bias=bias, **options)
        calls = calls_of(done)
        texts += bool(done.message.content)
        called += bool(calls)
        assert all(is_valid(arguments) for _, arguments in calls)
        made = done.message.tool_calls
        assert made or is_valid(json.loads(done.message.content))
        if made:
            results = [
                {"role": "tool", "content": "1", "tool_call_id": call.id}
                for call in done.message.tool_calls
            ]
            worker.turn("s", results, max_tokens=4)
    assert texts
    assert called


def test_constrained_sessions_are_decoded_with_others_as_alone(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker("llama", slots=3)
    options: dict[str, dict[str, Any]] = {
        "one": {"constraint": BY_SCHEMA, **SAMPLED},
        "two": {"constraint": pb.Constraint(tool_choice="required", single_call=True), **SAMPLED},
        "three": {"frequency_penalty": 1.0, **SAMPLED},
    }
    for name in options:  # whose grammars are compiled by then
        worker.open(name, tools=TOOLS)
        worker.turn(name, "hello", **options[name])
    for name in options:
        worker.open(name, tools=TOOLS)
    running = [worker.submit(name, "hello", **options[name]) for name in options]
    together = [list(each.result(600).token_ids) for each in running]
    assert max(sessions for sessions, _ in worker.engine.passes) == 3
    other = make_worker("llama")
    alone = []
    for name in options:
        other.open(name, tools=TOOLS)
        alone.append(list(other.turn(name, "hello", **options[name]).token_ids))
    assert together == alone, "a turn that is run again in another worker says the same"


def test_what_cannot_be_called_is_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker("llama")
    worker.open(tools=TOOLS)
    worker.open("bare")
    with pytest.raises(BadSettings, match="fly"):
        worker.turn("s", "x", constraint=pb.Constraint(tools=["fly"]))
    with pytest.raises(BadSettings, match="no tools"):
        worker.turn("bare", "x", constraint=pb.Constraint(tool_choice="required"))


def test_a_loose_tool_whose_schema_cannot_be_compiled_takes_any_object(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker("llama")
    worker.open(tools=[make_tool("odd", parameters={"type": "wat"})])
    mark = worker.engine.tokenizer.inner.convert_tokens_to_ids("<tool_call>")
    done = worker.turn("s", "hello", logit_bias=[pb.TokenBias(id=mark, bias=12.0)], max_tokens=40)
    assert done.message.content or done.message.tool_calls


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_an_answer_is_a_text_of_its_grammar(
    tools: list[str], make_worker: Callable[..., Any]
) -> None:
    worker = make_worker("llama")
    worker.open(tools=tools)
    constraint = pb.Constraint(grammar='start: "floor " /[0-9]{2}/ "!"', tool_choice="none")
    done = worker.turn("s", "hello", constraint=constraint, **SAMPLED)
    assert done.finish_reason == "stop"
    assert re.fullmatch(r"floor [0-9]{2}!", done.message.content)
