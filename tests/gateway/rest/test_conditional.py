"""Conditional requests: what has not changed is not sent again, and every commit changes it."""

from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

WEATHER = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
READS = (
    "",
    "/turns",
    "/memory",
    "/memory/map",
    "/memory/tokens",
    "/pauses",
    "/repairs",
    "/episodes",
)


async def pause(api: Any, session: str) -> None:
    api.worker.script = [[WEATHER]]
    assert (await api.turn(session, "how is it in Bern")).json()["finish_reason"] == "tool_calls"


async def report(api: Any, session: str, kind: str, **fields: Any) -> None:
    body = {"type": kind, "call_id": "c1", **fields}
    answer = await api.http.post(f"/v1/sessions/{session}/events", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", READS)
async def test_what_has_not_changed_is_not_sent_again(api: Any, route: str) -> None:
    session = await api.session()
    await api.turn(session)
    path = f"/v1/sessions/{session}{route}"
    first = await api.http.get(path)
    assert first.headers["cache-control"] == "private, no-cache"
    known = {"If-None-Match": f'"other", W/{first.headers["etag"]}'}
    again = await api.http.get(path, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    for other in ('"other"', "", f"x{first.headers['etag']}"):
        assert (await api.http.get(path, headers={"If-None-Match": other})).content


@pytest.mark.parametrize("route", [route for route in READS if route != "/episodes"])
async def test_a_turn_changes_the_tag(api: Any, route: str) -> None:
    session = await api.session(repair_rows=8, repair_on=["turn"])
    await api.turn(session)
    path = f"/v1/sessions/{session}{route}"
    first = await api.http.get(path)
    await pause(api, session)
    if route == "/repairs":
        await report(api, session, "tool_call.completed", result="rain")
        await api.turn(session, "so?", repair=True)
    changed = await api.http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200
    assert changed.headers["etag"] != first.headers["etag"]


async def test_an_event_and_a_repair_change_the_tag_of_pauses(api: Any) -> None:
    session = await api.session(repair_rows=0)
    await pause(api, session)
    path = f"/v1/sessions/{session}/pauses"
    tags = [(await api.http.get(path)).headers["etag"]]
    await report(api, session, "tool_call.started")
    tags.append((await api.http.get(path)).headers["etag"])
    await report(api, session, "tool_call.completed", result="rain")
    tags.append((await api.http.get(path)).headers["etag"])
    assert len(set(tags)) == 3


async def test_a_list_that_has_not_changed_is_not_sent_again(api: Any) -> None:
    session = await api.session()
    first = await api.http.get("/v1/sessions")
    known = {"If-None-Match": first.headers["etag"]}
    assert (await api.http.get("/v1/sessions", headers=known)).status_code == 304
    await api.turn(session)
    assert (await api.http.get("/v1/sessions", headers=known)).status_code == 200
