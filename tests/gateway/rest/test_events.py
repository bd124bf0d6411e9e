"""REST API of tool events and the pause between a call and its result."""

from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

CALL = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# Of the stub worker, whose reports are made up.
REPAIR_ON_CALL = {
    "trigger": "tool_call",
    "signal_tokens": 3,
    "observed_tokens": 3,
    "candidates": 8,
    "scored_rows": 8,
    "share_scanned": 1.0,
    "promoted": 2,
    "demoted": 1,
    "seconds": 0.5,
    "truncated": False,
    "bytes_read": 640,
}
REPAIRS_OF_PAUSE = {
    "repairs": 2,
    "signals": ["tool_call", "tool_result"],
    "scored_rows": 16,
    "promoted": 4,
    "demoted": 2,
    "seconds": 1.0,
    "truncated": 0,
    "skipped": 0,
}


async def test_a_tool_call_pauses_and_its_result_resumes(api: Any) -> None:
    session = await api.session(tools=[TOOL])
    api.worker.script = [[CALL], "take an umbrella"]
    asked = (await api.turn(session)).json()
    assert asked["finish_reason"] == "tool_calls"
    assert asked["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": None,
        "tool_calls": [OPENAI_CALL],
    }
    view = (await api.http.get(f"/v1/sessions/{session}")).json()
    assert view["state"] in ("paused", "repairing")
    pending = {"id": "c1", "name": "weather", "arguments": '{"city": "Bern"}', "status": "pending"}
    assert view["pending_calls"] == [pending]

    url = f"/v1/sessions/{session}/events"
    started = (await api.http.post(url, json={"type": "tool_call.started", "call_id": "c1"})).json()
    assert (started["status"], started["outstanding"]) == ("pending", ["c1"])
    await api.http.post(url, json={"type": "tool_call.delta", "call_id": "c1", "delta": "ra"})
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    done = (await api.http.post(url, json=event)).json()
    assert (done["session"], done["type"], done["status"]) == (
        session,
        "tool_call.completed",
        "completed",
    )
    assert done["outstanding"] == []

    waiting = {"wait_for_repairs": True}
    resumed = (await api.http.post(f"/v1/sessions/{session}/turns", json=waiting)).json()
    assert resumed["message"]["content"] == "take an umbrella"
    assert [repair["trigger"] for repair in resumed["memory"]["repairs"]] == [
        "tool_call",
        "tool_result",
    ]
    first = resumed["memory"]["repairs"][0]
    assert first.pop("in_pause") in (True, False)
    assert first == REPAIR_ON_CALL
    assert resumed["memory"]["repair"] == REPAIRS_OF_PAUSE
    assert (await api.http.get(f"/v1/sessions/{session}")).json()["state"] == "idle"


async def test_late_or_repeated_events_are_acknowledged_without_effect(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    await api.turn(session)
    url = f"/v1/sessions/{session}/events"
    done = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    first = (await api.http.post(url, json=done)).json()
    assert not first["late"]
    assert (await api.http.post(url, json=done)).json()["status"] == first["status"] == "completed"
    started = await api.http.post(
        url, json={"type": "tool_call.started", "call_id": "c1", "arguments": "{}"}
    )
    assert (started.status_code, started.json()["late"]) == (200, True)
    await api.http.post(f"/v1/sessions/{session}/turns", json={})
    again = await api.http.post(url, json=done)
    assert (again.status_code, again.json()["late"]) == (200, True)
    other = await api.http.post(url, json={**done, "result": "sun"})
    assert (other.status_code, other.json()["code"]) == (409, "result_conflict")


async def test_a_failed_call_is_appended_for_the_model(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    await api.turn(session)
    event = {"type": "tool_call.failed", "call_id": "c1", "result": "timed out"}
    receipt = (await api.http.post(f"/v1/sessions/{session}/events", json=event)).json()
    assert receipt["status"] == "failed"
    await api.http.post(f"/v1/sessions/{session}/turns", json={})
    (_, turn) = await api.catalog.turns.get_after(session, 0, 5)
    assert turn.messages[0].content == "timed out"
