"""REST API of turns: sampling, logprobs, streams."""

from collections.abc import Callable
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

CALL = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}


async def test_a_turn_returns_the_reply_usage_and_memory(api: Any) -> None:
    session = await api.session()
    api.worker.script = ["it rains"]
    answer = await api.turn(session)
    assert answer.status_code == 200
    turn = answer.json()
    assert turn.pop("seconds").keys() == {"waiting", "prefill", "decode"}
    assert turn == {
        "session": session,
        "turn": 1,
        "message": {
            "role": "assistant",
            "content": "it rains",
            "tool_calls": None,
            "reasoning": None,
        },
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 2,
            "output_tokens": 2,
            "reasoning_tokens": 0,
            "dropped_tokens": 0,
        },
        "memory": {
            "length": 4,
            "budget": 64,
            "active_rows": 4,
            "peak_rows": 6,
            "bound_rows": 96,
            "active_bytes": 256,
            "evicted_rows": 0,
            "promoted_rows": 0,
            "tier_bytes": {"ram": 256},
            "repair": {
                "repairs": 0,
                "signals": [],
                "scored_rows": 0,
                "promoted": 0,
                "demoted": 0,
                "seconds": 0,
                "truncated": 0,
                "skipped": 0,
            },
            "repairs": [],
        },
        "fidelity": None,
        "episode": None,
        "durable": True,
        "logprobs": None,
        "reselections": None,
        "prefill": None,
        "retrieval": None,
        "remembered": None,
    }


async def test_a_turn_can_append_without_generating(api: Any) -> None:
    session = await api.session()
    turn = (await api.turn(session, generate=False)).json()
    assert (turn["message"], turn["finish_reason"]) == (None, "appended")


async def test_fidelity_is_measured_against_saved_logprobs(api: Any) -> None:
    saved = await api.session()
    compared = await api.session()
    requests = []
    worker_turn = api.worker.turn

    def record_turn(request: Any) -> Any:
        requests.append(request)
        return worker_turn(request)

    api.worker.turn = record_turn
    assert (await api.turn(saved, logprobs={"save": True})).json()["fidelity"] is None
    turn = (await api.turn(compared, logprobs={"compare_with": saved})).json()
    assert turn["fidelity"] == {"tokens": 5, "kl_mean": 0.5, "top1_agreement": 0.8}
    assert [request.keep_distribution for request in requests] == [True, False]
    assert requests[1].compare_with == saved


async def test_a_stream_sends_tokens_then_done(
    api: Any, parse_events: Callable[[str], Any]
) -> None:
    session = await api.session()
    api.worker.script = ["it rains é"]
    answer = await api.turn(session, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.text)
    assert [name for name, _ in events] == ["token", "token", "token", "done"]
    assert "".join(data["text"] for name, data in events[:3]) == "it rains é "
    plain = (await api.turn(await api.session())).json()
    assert events[-1][1].keys() == plain.keys()


async def test_a_stream_sends_tool_calls(api: Any, parse_events: Callable[[str], Any]) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    events = parse_events((await api.turn(session, stream=True)).text)
    *deltas, made, done = events
    assert {name for name, _ in deltas} == {"arguments_delta"}
    assert len(deltas) > 1
    pieces = [data["arguments"] for _, data in deltas]
    function: Any = OPENAI_CALL["function"]
    assert "".join(pieces) == function["arguments"]
    assert {(data["id"], data["name"]) for _, data in deltas} == {
        (OPENAI_CALL["id"], function["name"])
    }
    assert made == ("tool_call", OPENAI_CALL)
    assert done[1]["finish_reason"] == "tool_calls"
