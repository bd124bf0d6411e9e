"""Streamed turns over a real connection: order of events, heartbeats, disconnects."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.http.settings import GatewaySettings
from kvrecall.protocol.v1 import worker_pb2 as pb


async def wait_until(condition: Any) -> None:
    """Poll a condition: the server notices a closed connection only when it reads."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_tokens_arrive_while_the_turn_still_runs(served: Any) -> None:
    session = await served.session()
    served.worker.script = ["one two"]
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with served.http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: token"
        served.worker.gates["token"] = asyncio.Event()
        assert await anext(lines) == 'data: {"text": "one "}'
        served.worker.gates["token"].set()
        assert [line async for line in lines][-3] == "event: done"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnected_client_cancels_its_turn(served: Any, stream: bool) -> None:
    session = await served.session()
    before = await served.catalog.sessions.get(session)
    served.worker.gates["token"] = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    url = f"{served.http.base_url}/v1/sessions/{session}/turns"
    async with httpx.AsyncClient() as leaving:
        asking = asyncio.create_task(leaving.post(url, json=body))
        await served.worker.reached["token"].wait()
        asking.cancel()
        await asyncio.wait({asking})
    await wait_until(lambda: served.worker.open_turns == 0)
    assert await served.catalog.sessions.get(session) == before
    served.worker.gates.clear()
    assert (await served.turn(session, queue=True)).json()["turn"] == 1


async def test_a_concurrent_turn_is_busy_unless_it_queues(served: Any) -> None:
    session = await served.session()
    served.worker.gates["token"] = asyncio.Event()
    first = asyncio.create_task(served.turn(session))
    await served.worker.reached["token"].wait()
    busy = await served.turn(session)
    assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
    assert (await served.http.delete(f"/v1/sessions/{session}")).status_code == 409
    assert (await served.http.get(f"/v1/sessions/{session}")).json()["state"] == "prefilling"
    queued = asyncio.create_task(served.turn(session, queue=True))
    await asyncio.sleep(0.05)
    served.worker.gates["token"].set()
    assert ((await first).json()["turn"], (await queued).json()["turn"]) == (1, 2)


class TestHeartbeat:
    """Heartbeats of a server with a short interval."""

    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(heartbeat_seconds=0.01)

    async def test_heartbeats_are_sent_while_the_turn_waits(self, served: Any) -> None:
        session = await served.session()
        served.worker.gates["token"] = asyncio.Event()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with served.http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": waiting"
            served.worker.gates["token"].set()
            assert "event: done" in [line async for line in lines]

    async def test_anthropics_streams_have_pings_also_while_a_call_is_written(
        self, served: Any
    ) -> None:
        call = pb.ToolCall(id="c", name="f", arguments='{"city": "Bern"}')
        served.worker.script = [[call]]
        served.worker.gates["call"] = asyncio.Event()
        body = {
            "model": served.service.info.model,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "stream": True,
        }
        async with served.http.stream("POST", "/v1/messages", json=body) as answer:
            pings = 0
            async for line in answer.aiter_lines():
                assert not line.startswith(":")
                pings += line == "event: ping"
                if pings == 3:
                    served.worker.gates["call"].set()
            assert pings >= 3
            assert line == ""
