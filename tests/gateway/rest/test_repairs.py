"""REST API of repairs: on a turn's path, cut short by a turn, in the history."""

import asyncio
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

CALL = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')


async def test_an_early_turn_reports_the_share_scanned(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    api.worker.gates["repair"] = asyncio.Event()
    await api.turn(session)
    await api.worker.reached["repair"].wait()
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    await api.http.post(f"/v1/sessions/{session}/events", json=event)
    memory = (await api.http.post(f"/v1/sessions/{session}/turns", json={})).json()["memory"]
    assert [
        (each["truncated"], each["share_scanned"], each["in_pause"]) for each in memory["repairs"]
    ] == [(True, 0.5, False)]
    assert (memory["repair"]["truncated"], memory["repair"]["skipped"]) == (1, 1)


async def test_a_turn_can_request_a_repair_before_its_prefill(api: Any) -> None:
    session = await api.session()
    memory = (await api.turn(session, repair=True)).json()["memory"]
    assert [repair["trigger"] for repair in memory["repairs"]] == ["turn"]
    other = await api.session(repair_rows=0)
    refused = await api.turn(other, repair=True)
    assert (refused.status_code, refused.json()["field"]) == (422, "repair")


async def test_repairs_are_listed_with_the_promoted_text(api: Any) -> None:
    session = await api.session()
    await api.turn(session, "one two three four", repair=True)
    url = f"/v1/sessions/{session}/repairs"
    (repair,) = (await api.http.get(url)).json()["repairs"]
    assert (repair["number"], repair["turn"], repair["trigger"], repair["signal"]) == (
        1,
        1,
        "turn",
        "one two three four",
    )
    assert repair["passages"] == [
        {"start": 0, "stop": 2, "before": "", "promoted": "user one", "after": "two three four ok"},
        {"start": 3, "stop": 4, "before": "user one two", "promoted": "three", "after": "four ok"},
    ]
    await api.turn(session, "more", repair=True)
    newest = (await api.http.get(url, params={"limit": 1})).json()["repairs"]
    assert [repair["number"] for repair in newest] == [2]
    assert (await api.http.get("/v1/sessions/unknown/repairs")).status_code == 404
    assert (await api.http.get(url, params={"limit": 33})).status_code == 422
