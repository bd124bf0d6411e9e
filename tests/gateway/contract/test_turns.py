"""Turns through either API: replies, streams, pauses for tools, repairs, cancellation."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.domain.settings.session import PAUSE_TRIGGERS
from kvrecall.protocol.v1 import worker_pb2
from kvrecall_server.testing import StubWorker
from tests.gateway.contract.clients import Client, Refused
from tests.gateway.contract.conftest import Both
from tests.research import nest_research

CALL = worker_pb2.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def session(both: Both) -> Callable[..., Any]:
    """Creates a session, repaired in pauses alone, and returns its id."""

    async def create(**body: Any) -> str:
        default = {"budget": 64, "method": "snapkv", "seed": 1, "repair_on": sorted(PAUSE_TRIGGERS)}
        return str((await both.rest.create(nest_research(default | body)))["id"])

    return create


async def test_a_turn_returns_the_reply_usage_and_memory(
    client: Client, worker: StubWorker, session: Any
) -> None:
    worker.script = ["it rains"]
    turn = await client.turn(await session(), USER)
    assert turn["message"]["role"] == "assistant"
    assert turn["message"]["content"] == "it rains"
    assert (turn["turn"], turn["finish_reason"], turn["durable"]) == (1, "stop", True)
    assert turn["usage"] == {
        "prompt_tokens": 2,
        "output_tokens": 2,
        "reasoning_tokens": 0,
        "dropped_tokens": 0,
    }
    assert turn["seconds"].keys() == {"waiting", "prefill", "decode"}
    assert turn["seconds"]["prefill"] == 0.25
    memory = turn["memory"]
    assert (memory["length"], memory["peak_rows"], memory["bound_rows"]) == (4, 6, 96)
    assert (memory["tier_bytes"], memory["repairs"]) == ({"ram": 256}, [])


async def test_a_turn_reports_the_re_selections_of_its_answer(
    client: Client, worker: StubWorker, session: Any
) -> None:
    worker.script = ["it rains"]
    name = await session(reselect={"every": 4})
    turn = await client.turn(name, USER)
    report = {"count": 2, "rows_in": 40, "rows_out": 30, "seconds": 0.25}
    assert turn["reselections"] == report
    appended = await client.turn(name, {**USER, "generate": False})
    assert appended.get("reselections") is None


async def test_a_turn_is_the_same_in_both_apis(both: Both, session: Any) -> None:
    turns = []
    for client in (both.rest, both.rpc):
        both.worker.script = [[CALL]]
        turn = await client.turn(await session(), {**USER, "repair": True})
        for name in ("seconds", "session"):
            del turn[name]
        turns.append({name: value for name, value in turn.items() if value is not None})
    rest, rpc = turns
    assert rpc["message"].pop("tool_call_id") == rpc["message"].pop("name") == ""
    assert rpc["message"].pop("content") == rpc["message"].pop("reasoning") == ""
    assert rpc.pop("logprobs") == []
    assert rest["message"].pop("reasoning") is None
    assert rest["message"].pop("content") is None
    assert rest == rpc


async def test_a_turn_reports_its_sparse_blocks(both: Both, client: Client, session: Any) -> None:
    id = await session(prefill={"sparse": "on"})
    report = {"blocks": 2, "cover_min": 0.9375, "cover_mean": 0.96875, "density": 0.25}
    assert (await client.turn(id, USER))["prefill"] == report
    assert (await client.turn(await session(), USER)).get("prefill") is None


async def test_a_turn_reports_its_retrieval(both: Both, client: Client, session: Any) -> None:
    id = await session(retrieve={"share": 0.25})
    report = {"steps": 5, "rows": 80, "seconds": 0.125, "refused": False}
    assert (await client.turn(id, USER))["retrieval"] == report
    assert (await client.turn(await session(), USER)).get("retrieval") is None


async def test_a_turn_can_append_without_generating(client: Client, session: Any) -> None:
    id = await session()
    turn = await client.turn(id, {**USER, "generate": False})
    assert (turn.get("message"), turn["finish_reason"]) == (None, "appended")
    recorded = [
        {"role": "user", "content": "how is it there"},
        {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": "it rains"},
    ]
    assert (await client.turn(id, {"messages": recorded, "generate": False}))["turn"] == 2


async def test_sampling_parameters_reach_the_worker_unchanged(
    client: Client, worker: StubWorker, session: Any
) -> None:
    seen = []
    worker_turn = worker.turn

    def record_turn(request: Any) -> Any:
        seen.append(request.sampling)
        return worker_turn(request)

    worker.turn = record_turn  # type: ignore[method-assign]
    id = await session()
    sampling = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "seed": 5,
        "stop": ["\n"],
    }
    await client.turn(id, {**USER, **sampling})
    await client.turn(id, USER)
    expected = worker_pb2.Sampling(
        max_tokens=3, temperature=0.5, top_p=0.25, top_k=4, seed=5, stop=["\n"]
    )
    assert seen == [expected, worker_pb2.Sampling(max_tokens=50, seed=3)]


async def test_options_of_answers_reach_the_worker_as_the_same_values(
    both: Both, session: Any
) -> None:
    seen = []
    worker_turn = both.worker.turn

    def record_turn(request: Any) -> Any:
        seen.append(request.sampling)
        return worker_turn(request)

    both.worker.turn = record_turn  # type: ignore[method-assign]
    options = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_p": 0.125,
        "logit_bias": {"5": -100.0, "7": 1.5},
        "parallel_tool_calls": False,
        "logprobs": {"top": 2},
        "seed": 3,
    }
    tool = {"type": "function", "function": {"name": "weather"}}
    schema = {"type": "object", "required": ["b", "a"]}
    rest = {
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [tool]},
        },
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": schema, "strict": True},
        },
    }
    rpc = {
        "tool_choice": {"mode": "TOOL_MODE_REQUIRED", "tools": ["weather"]},
        "response_format": {"json_schema": {"schema": json.dumps(schema), "strict": True}},
    }
    await both.rest.turn(await session(tools=[TOOL]), {**USER, **options, **rest})
    await both.rpc.turn(await session(tools=[TOOL]), {**USER, **options, **rpc})
    assert seen[0] == seen[1]
    assert seen[0].min_p == 0.125
    assert "weather" in str(seen[0])


async def test_fidelity_is_measured_against_saved_logprobs(client: Client, session: Any) -> None:
    saved, compared = await session(), await session()
    turn = await client.turn(saved, {**USER, "logprobs": {"save": True}})
    assert turn.get("fidelity") is None
    turn = await client.turn(compared, {**USER, "logprobs": {"compare_with": saved}})
    assert turn["fidelity"] == {"tokens": 5, "kl_mean": 0.5, "top1_agreement": 0.8}


async def test_a_stream_sends_the_text_and_last_the_turn(
    client: Client, worker: StubWorker, session: Any
) -> None:
    worker.script = ["it rains é", "it rains é"]
    id = await session()
    events = await client.stream(id, USER, key="k")
    assert [name for name, _ in events] == ["token", "token", "token", "done"]
    assert "".join(data["text"] for name, data in events[:3]) == "it rains é "
    assert events[-1][1]["message"]["content"] == "it rains é"
    again = await client.stream(id, USER, key="k")
    assert (again[-1], worker.script) == (events[-1], ["it rains é"])


async def test_a_stream_sends_tool_calls(client: Client, worker: StubWorker, session: Any) -> None:
    worker.script = [[CALL]]
    events = await client.stream(await session(), USER)
    *deltas, made, done = events
    assert {name for name, _ in deltas} == {"arguments_delta"}
    assert len(deltas) > 1
    pieces = [data["arguments"] for _, data in deltas]
    assert "".join(pieces) == CALL.arguments
    assert {(data["id"], data["name"]) for _, data in deltas} == {(CALL.id, CALL.name)}
    assert made == ("tool_call", OPENAI_CALL)
    assert done[1]["finish_reason"] == "tool_calls"


async def test_a_tool_call_pauses_and_its_result_resumes(
    client: Client, worker: StubWorker, session: Any
) -> None:
    worker.script = [[CALL], "take an umbrella"]
    id = await session(tools=[TOOL])
    asked = await client.turn(id, USER)
    assert asked["message"]["tool_calls"] == [OPENAI_CALL]
    view = await client.get(id)
    assert view["state"] in ("paused", "repairing")
    pending = {"id": "c1", "name": "weather", "arguments": '{"city": "Bern"}', "status": "pending"}
    assert view["pending_calls"] == [pending]

    started = await client.event(id, {"type": "tool_call.started", "call_id": "c1"})
    assert (started["status"], started["outstanding"]) == ("pending", ["c1"])
    await client.event(id, {"type": "tool_call.delta", "call_id": "c1", "delta": "ra", "index": 0})
    result = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    done = await client.event(id, result)
    assert done["type"].rpartition(".")[2] == done["status"] == "completed"
    assert (done["outstanding"], done["late"]) == ([], False)
    with pytest.raises(Refused) as refused:
        await client.event(id, {**result, "result": "sun"})
    assert refused.value.code == "result_conflict"

    resumed = await client.turn(id, {"wait_for_repairs": True})
    assert resumed["message"]["content"] == "take an umbrella"
    triggers = [repair["trigger"] for repair in resumed["memory"]["repairs"]]
    assert triggers == resumed["memory"]["repair"]["signals"] == ["tool_call", "tool_result"]
    assert resumed["memory"]["repair"]["seconds"] == 1.0
    assert (await client.get(id))["state"] == "idle"
    assert (await client.event(id, result))["late"]


async def test_a_failed_call_is_appended_for_the_model(
    both: Both, client: Client, session: Any
) -> None:
    both.worker.script = [[CALL]]
    id = await session()
    await client.turn(id, USER)
    event = {"type": "tool_call.failed", "call_id": "c1", "result": ""}
    assert (await client.event(id, event, key="k"))["status"] == "failed"
    assert (await client.event(id, event, key="k"))["late"] is False
    await client.turn(id, {})
    (_, turn) = await both.catalog.turns.get_after(id, 0, 5)
    assert (turn.messages[0].role, turn.messages[0].content) == ("tool", "")


async def test_memory_and_repairs_are_reported(client: Client, session: Any) -> None:
    id = await session()
    words = {"messages": [{"role": "user", "content": "one two three four"}]}
    await client.turn(id, {**words, "repair": True})
    memory = await client.read(id, "memory")
    assert (memory["session"], memory["length"], memory["in_slot"]) == (id, 6, True)
    assert memory["layer_bound_rows"] == [96, 96]
    assert memory["retrieval_bytes"] == 48
    (repair,) = (await client.read(id, "repairs"))["repairs"]
    assert (repair["number"], repair["turn"], repair["trigger"]) == (1, 1, "turn")
    assert repair["signal"] == "one two three four"
    assert repair["passages"][0] == {
        "start": 0,
        "stop": 2,
        "before": "",
        "promoted": "user one",
        "after": "two three four ok",
    }
    await client.turn(id, {**USER, "repair": True})
    newest = (await client.read(id, "repairs", limit=1))["repairs"]
    assert [repair["number"] for repair in newest] == [2]


async def test_a_client_that_goes_away_cancels_its_turn(
    client: Client, worker: StubWorker, session: Any, until_async: Any
) -> None:
    worker.script = ["one two", "three"]
    worker.gates["token"] = gate = asyncio.Event()
    id = await session()
    begun = asyncio.create_task(client.begin_stream(id, USER))
    await worker.reached["token"].wait()
    gate.set()
    gate.clear()
    await asyncio.sleep(0)
    stream = await begun
    await stream.abandon()
    await until_async(lambda: worker.open_turns == 0)
    gate.set()
    assert (await client.get(id))["turns"] == 0
    assert (await client.turn(id, USER))["message"]["content"] == "three"


async def test_a_session_that_is_busy_refuses_a_second_turn(
    client: Client, worker: StubWorker, session: Any
) -> None:
    worker.gates["token"] = gate = asyncio.Event()
    id = await session()
    running = asyncio.create_task(client.turn(id, USER))
    await worker.reached["token"].wait()
    for refused_call in (client.turn(id, USER), client.delete(id)):
        with pytest.raises(Refused) as refused:
            await refused_call
        assert refused.value.code == "session_busy"
    gate.set()
    assert (await running)["turn"] == 1
