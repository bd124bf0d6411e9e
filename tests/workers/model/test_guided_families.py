"""Every family's calls are held to the tools' schemas, in the family's own form."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvrecall.domain.answer.constraints import (
    FREE,
    KEYED_CALLS,
    RAW_CALLS,
    TAGGED_CALLS,
    UNGUIDED_CALLS,
    Constraint,
    ToolChoice,
)
from tests.workers.generation.test_guide import Answer
from tests.workers.model.written_calls import SPELLED, TAGGED, TEMPLATES, write
from workers.model.answer_formats import _FAMILIES
from workers.model.tokenizer import ChatTokenizer

REQUIRED = Constraint(tool_choice=ToolChoice.REQUIRED)
SINGLE = Constraint(tool_choice=ToolChoice.REQUIRED, single_call=True)
GUIDED = sorted({row.name for _, row in _FAMILIES if row.grammar})
# One call an answer, and forms that begin without their mark where a call is required.
ONE = {"llama", "llama4", "harmony"}
TOOLS = tuple(
    json.dumps(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "unit": {"type": "string", "enum": ["C", "F"]},
                        "days": {"type": "integer"},
                    },
                    "required": ["city", "days"],
                },
            },
        }
    )
    for name in ("weather", "tides")
)
OSLO: dict[str, Any] = {"city": "Oslo's \n </fjord>", "days": 2}
BERGEN: dict[str, Any] = {"city": "Bergen", "unit": "C", "days": 12}


def make(tokenizer: ChatTokenizer, family: str) -> ChatTokenizer:
    template, tokens = TEMPLATES[family]
    inner = deepcopy(tokenizer.inner)
    inner.chat_template = template
    inner.add_special_tokens({"additional_special_tokens": list(tokens)})
    return ChatTokenizer(inner, tokenizer.eos_token_ids)


def spell(family: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls as the grammar has them: values behind keys are JSON."""
    if family in ("lfm2", "olmo"):
        texts = [
            f"{name}({', '.join(f'{key}={json.dumps(it)}' for key, it in given.items())})"
            for name, given in calls
        ]
        if family == "olmo":
            return "<function_calls>" + "\n".join(texts) + "</function_calls>"
        return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"
    text = write("llama" if family == "llama4" else family, list(calls))
    if family == "harmony":
        return f"<|channel|>commentary{text}"
    return text.removeprefix("<|python_tag|>")


@pytest.mark.parametrize("family", GUIDED)
def test_a_required_call_is_one_of_the_tools_with_its_arguments(
    family: str, tokenizer: ChatTokenizer
) -> None:
    model = make(tokenizer, family)
    answer = Answer(model, REQUIRED, tools=TOOLS)
    assert not answer.may_end
    assert answer.say(spell(family, ("tides", OSLO)))
    assert answer.may_end
    answer.stream.finish()
    (call,) = answer.stream.parse().calls
    assert (call.name, json.loads(call.arguments)) == ("tides", OSLO)
    for name, wrong in (
        ("tide", OSLO),
        ("tides", {"city": "Oslo", "days": "two"}),
        ("tides", {"city": "Oslo"}),
        ("tides", {"city": "Oslo", "unit": "K", "days": 2}),
    ):
        said = Answer(model, REQUIRED, tools=TOOLS).say(spell(family, (name, wrong)))
        assert not said, wrong


@pytest.mark.parametrize("family", sorted(set(GUIDED) - ONE))
def test_several_calls_or_one(family: str, tokenizer: ChatTokenizer) -> None:
    model = make(tokenizer, family)
    text = spell(family, ("tides", OSLO), ("weather", BERGEN))
    answer = Answer(model, REQUIRED, tools=TOOLS)
    assert answer.say(text)
    answer.stream.finish()
    found = [(call.name, json.loads(call.arguments)) for call in answer.stream.parse().calls]
    assert found == [("tides", OSLO), ("weather", BERGEN)]
    assert not Answer(model, SINGLE, tools=TOOLS).say(text)


@pytest.mark.parametrize("family", sorted(set(GUIDED) - {"llama", "llama4"}))
def test_a_call_of_the_models_own_accord_is_held_from_its_mark_on(
    family: str, tokenizer: ChatTokenizer
) -> None:
    model = make(tokenizer, family)
    answer = Answer(model, FREE, tools=TOOLS)
    assert answer.say(f"Let me look. {spell(family, ('weather', BERGEN))}")
    assert answer.may_end
    wrong = spell(family, ("weather", {"city": "Oslo", "days": "two"}))
    assert not Answer(model, FREE, tools=TOOLS).say(f"Let me look. {wrong}")


def test_gateway_and_worker_agree_on_what_a_grammar_can_hold() -> None:
    rows = {row.name: row for _, row in _FAMILIES}
    assert set(rows) == set(SPELLED) | TAGGED, "each is written in the tests"
    own = {name: row.grammar.parameters for name, row in rows.items() if row.grammar}
    assert {name for name, row in rows.items() if row.grammar and row.grammar.quote} == RAW_CALLS
    assert {"response_template", *rows} - set(own) == UNGUIDED_CALLS
    assert {name for name, form in own.items() if form and not form.quoted} == TAGGED_CALLS
    assert {name for name, form in own.items() if form and form.quoted} == KEYED_CALLS


THOUGHT = "<|channel|>analysis<|message|>So, {}, I see.<|end|><|start|>assistant"


def test_a_constrained_answer_of_several_messages_reasons_first(
    byte_level: Callable[..., PreTrainedTokenizerFast],
) -> None:
    template, tokens = TEMPLATES["harmony"]
    inner = byte_level(template, "<|return|>", tokens)
    model = ChatTokenizer(inner, (inner.eos_token_id,))
    schema = Constraint(schema='{"type": "integer"}')
    for reasoned in ("", THOUGHT, THOUGHT + THOUGHT):
        answer = Answer(model, REQUIRED, tools=TOOLS)
        assert answer.say(reasoned + spell("harmony", ("tides", OSLO)))
        assert answer.may_end
        answer = Answer(model, schema, tools=())
        assert answer.say(f"{reasoned}<|channel|>final<|message|>42")
        assert answer.may_end
        assert not answer.say(" or so")
        answer = Answer(model, schema, tools=TOOLS)
        assert answer.say(reasoned + spell("harmony", ("tides", OSLO)))
    assert not Answer(model, REQUIRED, tools=TOOLS).say(f"{THOUGHT}<|channel|>final<|message|>")
    assert not Answer(model, schema, tools=()).say("<|channel|>final<|message|>forty")
