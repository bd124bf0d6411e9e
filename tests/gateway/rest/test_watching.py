"""REST API of those who watch: streams of events over a real connection, and the overview."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.settings import GatewaySettings
from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Event = tuple[str, dict[str, Any]]
ANN = {"X-Kvrecall-Tenant": "ann"}


class Reader:
    """Reads the events of one stream."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def read(self) -> Event:
        """Read one event; comments are skipped. Raises StopAsyncIteration at the end."""
        name = ""
        while True:
            line = await anext(self._lines)
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                return name, json.loads(line[6:])

    async def read_until(self, name: str, **fields: Any) -> list[Event]:
        """Read up to the first event with this name and these fields."""
        found = []
        while True:
            found.append(await self.read())
            if found[-1][0] == name and fields.items() <= found[-1][1].items():
                return found

    async def read_comment(self) -> str:
        """Read up to the next comment."""
        while True:
            line: str = await anext(self._lines)
            if line.startswith(":"):
                return line

    async def read_rest(self) -> list[Event]:
        """Read to the end of the stream."""
        found = []
        try:
            while True:
                found.append(await self.read())
        except StopAsyncIteration:
            return found


@asynccontextmanager
async def watch(api: Any, path: str, **headers: str) -> AsyncIterator[Reader]:
    async with api.http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Reader(response)


async def test_a_stream_begins_with_a_snapshot_and_follows_a_turn(served: Any) -> None:
    session = await served.session(repair_rows=0)
    await served.turn(session)
    async with watch(served, f"/v1/sessions/{session}/stream") as reader:
        name, snapshot = await reader.read()
        assert name == "snapshot"
        assert {key: snapshot[key] for key in ("session", "state", "turns", "calls")} == {
            "session": session,
            "state": "idle",
            "turns": 1,
            "calls": [],
        }
        served.worker.script = ["a secret answer"]
        turn = (await served.turn(session, "a secret question")).json()
        events = await reader.read_until("turn", status="committed")
        assert [name for name, _ in events] == ["turn", "state", "state", "state", "turn"]
        assert events[0][1] == {"session": session, "turn": 2, "status": "started"}
        states = [data["state"] for name, data in events if name == "state"]
        assert states == ["prefilling", "decoding", "idle"]
    assert "secret" not in json.dumps(events)
    assert turn["turn"] == 2


async def test_a_turn_a_pause_and_its_repair_are_told_in_numbers(served: Any) -> None:
    session = await served.session(repair_rows=8)
    async with watch(served, f"/v1/sessions/{session}/stream") as reader:
        served.worker.script = [[pb.ToolCall(id="c1", name="look", arguments='{"at": "it"}')]]
        await served.turn(session, "look")
        events = await reader.read_until("repair", status="committed")
        committed = next(d for n, d in events if n == "turn" and d["status"] == "committed")
        assert (committed["finish_reason"], committed["durable"]) == ("tool_calls", True)
        assert committed["length"] == committed["prompt_tokens"] + committed["output_tokens"]
        started, done = [data for name, data in events if name == "repair"]
        assert started == {
            "session": session,
            "status": "started",
            "trigger": "tool_call",
            "call": "c1",
        }
        assert (done["promoted"], done["candidates"], done["call"]) == (2, 8, "c1")
        body = {"type": "tool_call.completed", "call_id": "c1", "result": "a secret"}
        await served.http.post(f"/v1/sessions/{session}/events", json=body)
        events = await reader.read_until("call")
        assert events[-1][1] == {
            "session": session,
            "call": "c1",
            "status": "completed",
            "type": "tool_call.completed",
        }


async def test_the_stream_of_all_sessions_tells_creation_forks_and_deletion(served: Any) -> None:
    other = await served.session()
    async with watch(served, "/v1/stream") as reader:
        assert await reader.read() == ("snapshot", {"active": [], "sessions": 1})
        session = await served.session()
        await served.turn(session)
        child = (await served.http.post(f"/v1/sessions/{session}/fork", json={})).json()["id"]
        await served.http.delete(f"/v1/sessions/{other}")
        events = await reader.read_until("deleted")
    told = [(name, data) for name, data in events if name in ("created", "deleted")]
    assert told == [
        ("created", {"session": session}),
        ("created", {"session": child, "parent": session}),
        ("deleted", {"session": other}),
    ]


async def test_the_snapshot_of_all_sessions_names_those_in_a_turn(served: Any) -> None:
    session = await served.session()
    served.worker.gates["token"] = asyncio.Event()
    running = asyncio.create_task(served.turn(session))
    await served.worker.reached["token"].wait()
    async with watch(served, "/v1/stream") as reader:
        _, snapshot = await reader.read()
        assert snapshot["active"] == [{"session": session, "state": "prefilling"}]
        overview = (await served.http.get("/v1/overview")).json()
        assert overview["active"] == {"prefilling": 1, "decoding": 0, "repairing": 0}
    served.worker.gates.pop("token").set()
    await running


async def test_a_tenant_sees_its_own_sessions_only(served: Any) -> None:
    async with watch(served, "/v1/stream", **ANN) as ann, watch(served, "/v1/stream") as nobody:
        assert (await ann.read())[1]["sessions"] == 0
        await nobody.read()
        foreign = await served.session()
        await served.turn(foreign)
        body = {"budget": 64}
        own = (await served.http.post("/v1/sessions", json=body, headers=ANN)).json()["id"]
        assert await ann.read() == ("created", {"session": own})
        assert (await nobody.read())[1] == {"session": foreign}
        answer = await served.http.get(f"/v1/sessions/{own}/stream")
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session")
        # A turn that another tenant tries is none of the owner's.
        messages = [{"role": "user", "content": "hello"}]
        refused = await served.http.post(f"/v1/sessions/{own}/turns", json={"messages": messages})
        assert refused.status_code == 404
        await served.http.delete(f"/v1/sessions/{own}", headers=ANN)
        assert await ann.read() == ("deleted", {"session": own})
    overview = (await served.http.get("/v1/overview", headers=ANN)).json()
    assert (overview["totals"]["turns"], overview["totals"]["failed_turns"]) == (0, 0)


async def test_a_sessions_stream_ends_with_its_deletion(served: Any) -> None:
    session = await served.session()
    async with watch(served, f"/v1/sessions/{session}/stream") as reader:
        await reader.read()
        await served.http.delete(f"/v1/sessions/{session}")
        assert (await reader.read_rest())[-1] == ("deleted", {"session": session})


class TestLimits:
    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(max_streams=2, drain_seconds=5, retry_after_seconds=3)

    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(heartbeat_seconds=0.01)

    async def test_one_stream_too_many_is_refused_until_another_ends(self, served: Any) -> None:
        session = await served.session()
        async with watch(served, "/v1/stream") as first:
            await first.read()
            async with watch(served, f"/v1/sessions/{session}/stream") as second:
                await second.read()
                refused = await served.http.get("/v1/stream")
                assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
                assert refused.headers["retry-after"] == "3"
            # The server has to notice that the reader went.
            while len(served.service.feed.subscriptions) > 1:
                await served.http.get("/healthz")
            async with watch(served, "/v1/stream") as third:
                assert (await third.read())[0] == "snapshot"

    async def test_an_unknown_session_takes_no_stream(self, served: Any) -> None:
        for _ in range(3):
            assert (await served.http.get("/v1/sessions/s_none/stream")).status_code == 404
        assert not served.service.feed.subscriptions

    async def test_comments_keep_a_silent_connection_open(self, served: Any) -> None:
        async with watch(served, "/v1/stream") as reader:
            await reader.read()
            assert await reader.read_comment() == ": waiting"
            assert await reader.read_comment() == ": waiting"

    async def test_a_stop_ends_streams_and_refuses_new_ones(self, served: Any) -> None:
        async with watch(served, "/v1/stream") as reader:
            await reader.read()
            served.service.announce_stop()
            assert await reader.read_rest() == []
        refused = await served.http.get("/v1/stream")
        assert (refused.status_code, refused.json()["code"]) == (503, "shutting_down")


async def test_the_overview_counts_turns_tokens_repairs_and_failures(api: Any) -> None:
    session = await api.session(repair_rows=8)
    empty = (await api.http.get("/v1/overview")).json()
    assert (empty["sessions"], empty["totals"]["turns"]) == (1, 0)
    assert empty["totals"]["first_token_seconds_p50"] is None
    turns = [(await api.turn(session, "hello there", repair=True)).json() for _ in range(3)]
    api.worker.durable = False
    await api.turn(session)
    refused = await api.turn(session, "x" * 3000)
    assert refused.status_code == 413
    found = (await api.http.get("/v1/overview")).json()
    totals = found["totals"]
    assert (totals["turns"], totals["failed_turns"], totals["not_durable_turns"]) == (4, 1, 1)
    assert totals["prompt_tokens"] == 3 * turns[0]["usage"]["prompt_tokens"] + 2
    assert found["window_seconds"] == 900
    assert sum(step["turns"] for step in found["steps"]) == 4
    assert [step["at"] for step in found["steps"]] == sorted(step["at"] for step in found["steps"])


async def test_the_overview_counts_sessions_that_no_worker_took(api: Any) -> None:
    api.worker.faults["open"] = WorkerLost("no worker answers")
    refused = await api.http.post("/v1/sessions", json={"budget": 64})
    assert refused.status_code == 503
    assert (await api.http.post("/v1/sessions", json={"budget": 1})).status_code < 500
    await api.session()
    totals = (await api.http.get("/v1/overview")).json()["totals"]
    assert totals["failed_creations"] == 1, "what the client asked wrongly is not counted"
