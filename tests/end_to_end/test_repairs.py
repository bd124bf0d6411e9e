"""Interrupted repairs (crash, cancelled turn, deletion) leave no resources behind.

The early repairs of one pause with many calls last long enough to be caught in the middle.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.local.service import build_service
from kvrecall_server.app.settings import Settings
from services.service import SessionService

Json = dict[str, Any]
CALLS = 30
SETTINGS: Json = {
    "budget": 128,
    "research": {"method": "snapkv", "repair_rows": 32, "repair_on": ["tool_call"]},
    "seed": 5,
}
LAST: Json = {"wait_for_repairs": True, "max_tokens": 12, "stop": ["<tool_call>"]}
LATE_THREADS = 3
"""Readers of the store's files that start only once several read at the same time."""
GAUGES = (
    "worker_slots_in_use",
    "worker_sessions",
    "worker_jobs",
    "worker_active_rows",
    "turns_running",
    "turns_waiting",
)


def look_up(number: int) -> Json:
    """A recorded call that differs from its neighbours."""
    arguments = json.dumps({"name": f"Ada {number}", "thing": "locker"})
    return {"id": f"c{number}", "function": {"name": "look_up", "arguments": arguments}}


@pytest.fixture(scope="module")
def pause(say) -> Callable[..., str]:
    """A long session with many pending tool calls, whose first repairs are running or about to."""

    def begin(client) -> str:
        session = client.create_session(**SETTINGS).id
        client.turn(session, [say.user(say.chatter(41, 60))], generate=False)
        asking = {"role": "assistant", "tool_calls": [look_up(number) for number in range(CALLS)]}
        client.turn(session, [asking], generate=False)
        return session

    return begin


def answered(client, session: str) -> Json:
    """The turn that ends the pause, without values that differ between runs."""
    results = [
        {"role": "tool", "content": f"Number {n}.", "tool_call_id": f"c{n}"} for n in range(CALLS)
    ]
    turn = asdict(client.turn(session, results, **LAST))
    memory = {
        name: value
        for name, value in turn["memory"].items()
        if name not in ("tier_bytes", "peak_rows")
    }
    memory["repair"] = memory["repair"] | {"seconds": None}
    memory["repairs"] = [
        repair | {"seconds": None, "in_pause": None, "bytes_read": None}
        for repair in memory["repairs"]
    ]
    return turn | {"session": None, "seconds": None, "memory": memory}


def repaired(client, session: str) -> int:
    """Number of committed repairs of the session."""
    return len(client.repairs(session, limit=32))


def in_the_middle(client, session: str, say) -> None:
    """Wait until some repairs of the pause are done and another one is running."""
    say.until(lambda: repaired(client, session) > 2, "the first repairs")
    say.until(lambda: client.get_session(session).state == "repairing", "a repair")


def left(server) -> Json:
    """Resources that a session may leak: gauges, threads, open files, bytes of rows."""
    process = psutil.Process(server.process.pid)
    stored = sum(
        path.stat().st_size for path in (server.data / "pages").rglob("*") if path.is_file()
    )
    return {
        **{name: server.metric(f"kvrecall_{name}") for name in GAUGES},
        "tier_bytes": server.metric("kvrecall_tier_bytes"),
        "threads": process.num_threads(),
        "files": len(process.open_files()),
        "whole pages": stored // 100_000,
    }


def wait_for(server, nothing: Json, say) -> None:
    """Wait until the server has no more than without the session: its pages go in the background."""

    def is_gone() -> bool:
        now = left(server)
        most = nothing["threads"] + LATE_THREADS
        return now["threads"] <= most and now == {**nothing, "threads": now["threads"]}

    say.until(is_gone, "what the session had is gone", lambda: (left(server), nothing))


@pytest.fixture(scope="module")
def repairing(new_server) -> Any:
    """A server of this module."""
    server = new_server(KVRECALL_SERVICE__DRAIN_SECONDS="1")
    server.start()
    return server


@pytest.fixture(scope="module")
def undisturbed(repairing, pause) -> Json:
    """The reply of an undisturbed session."""
    session = pause(repairing.own)
    turn = answered(repairing.own, session)
    repairing.own.delete_session(session)
    assert len(turn["memory"]["repairs"]) == CALLS
    assert all(repair["promoted"] for repair in turn["memory"]["repairs"]), (
        "nothing was ever promoted"
    )
    return turn


@pytest.fixture
def nothing(repairing, undisturbed) -> Json:
    """Resources without sessions, in a server that has had some."""
    return left(repairing)


def hanging_turn(server, session: str, body: Json) -> socket.socket:
    """Send a turn and close the socket without reading the response."""
    address = urlsplit(server.url)
    content = json.dumps(body).encode()
    head = f"POST /v1/sessions/{session}/turns HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(content)}\r\n"
    connected = socket.create_connection((address.hostname, address.port))
    connected.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connected


def test_a_crash(repairing, nothing, undisturbed, pause, say) -> None:
    session = pause(repairing.own)
    in_the_middle(repairing.own, session, say)
    repairing.kill()
    repairing.start()
    assert 2 < repaired(repairing.own, session) < CALLS
    assert answered(repairing.own, session) == undisturbed
    repairing.own.delete_session(session)
    wait_for(repairing, {**nothing, "threads": 1000}, say)


def test_a_cancelled_turn(repairing, nothing, undisturbed, pause, say) -> None:
    session = pause(repairing.own)
    in_the_middle(repairing.own, session, say)
    results = [
        {"role": "tool", "content": "x", "tool_call_id": f"c{number}"} for number in range(CALLS)
    ]
    with hanging_turn(repairing, session, {"messages": results, "wait_for_repairs": True}):
        say.until(lambda: repairing.metric("kvrecall_turns_running") == 1, "the turn")
        assert repaired(repairing.own, session) < CALLS
    say.until(lambda: repairing.metric("kvrecall_turns_running") == 0, "the turn's end")
    say.until(lambda: repaired(repairing.own, session) == CALLS, "the repairs after the turn")
    assert repairing.own.get_session(session).turns == 2
    assert answered(repairing.own, session) == undisturbed
    repairing.own.delete_session(session)
    wait_for(repairing, nothing, say)


def test_a_deletion(repairing, nothing, pause, say) -> None:
    session = pause(repairing.own)
    in_the_middle(repairing.own, session, say)
    repairing.own.delete_session(session)
    wait_for(repairing, nothing, say)


@pytest.fixture
async def service(model: Path, tmp_path: Path, say) -> AsyncIterator[SessionService]:
    """The whole service with its real worker in this process."""
    service = await build_service(Settings(model=str(model), data=tmp_path / "data"))
    await service.start()
    yield service
    await service.stop()


async def paused_in_process(service: SessionService, say) -> str:
    """As `pause`, without a server."""
    on_calls = frozenset({RepairTrigger.TOOL_CALL})
    session = (
        await service.create(
            CreateSession(budget=128, method="snapkv", repair_rows=32, repair_on=on_calls)
        )
    ).id
    calls = [look_up(number) for number in range(CALLS)]
    asked = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in calls
    )
    for message in (Message("user", say.chatter(41, 60)), Message("assistant", tool_calls=asked)):
        [_ async for _ in service.turn(session, TurnRequest((message,), generate=False))]
    return session


@pytest.mark.parametrize("how", ["deleted", "turn cancelled"])
async def test_no_task_and_no_thread_is_left(service: SessionService, say, how: str) -> None:
    # The worker's threads start with its first rows.
    await service.delete(await paused_in_process(service, say))
    tasks = asyncio.all_tasks()
    threads = threading.active_count()
    session = await paused_in_process(service, say)
    for _ in range(100_000):
        if len(await service.repairs(session, 32)) > 2:
            break
    if how == "turn cancelled":
        results = tuple(Message("tool", "x", tool_call_id=f"c{number}") for number in range(CALLS))
        stream = service.turn(
            session, TurnRequest(results, sampling=Sampling(4), wait_for_repairs=True)
        )
        await asyncio.sleep(0.02)
        await stream.aclose()
        assert (await service.get(session))[0].turns == 2
    assert 2 < len(await service.repairs(session, 32)) < CALLS
    await service.delete(session)
    assert asyncio.all_tasks() == tasks
    assert threading.active_count() <= threads + LATE_THREADS
    (stats,) = (await service.describe_workers())[1].values()
    assert stats.slots_in_use == stats.sessions == 0
