"""Async client against the served application."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvrecall import AsyncKvrecallClient, KvrecallClient
from kvrecall.client import (
    AsyncSessionHandle,
    ConnectionFailed,
    InvalidRequest,
    NotFound,
    SessionHandle,
    TextDelta,
    TurnCompleted,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RECORDED_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [CALL]},
]


async def test_a_session_is_created_used_and_deleted(async_client: AsyncKvrecallClient) -> None:
    session = await async_client.create_session(budget=64)
    assert await async_client.get_session(session.id) == session
    turn = await async_client.turn(session, "Hello", max_tokens=60, temperature=0)
    assert (turn.turn, turn.text) == (1, "ok")
    assert (await async_client.memory(session)).length == 3
    assert session.id in [known.id for known in (await async_client.list_sessions()).sessions]
    fork = await async_client.fork(session)
    assert fork.turns == 1
    await async_client.delete_session(session)
    with pytest.raises(NotFound):
        await async_client.get_session(session)
    await async_client.delete_session(fork)


async def test_the_service_describes_itself(async_client: AsyncKvrecallClient) -> None:
    assert await async_client.ready()
    assert (await async_client.worker()).model == "scripted"
    assert len((await async_client.methods()).methods) == 4
    assert len(await async_client.workers()) == 1


async def test_a_session_object_is_awaited_or_a_context_manager(
    async_client: AsyncKvrecallClient,
) -> None:
    async with async_client.session(budget=64) as session:
        assert (await session.say("Hello")).turn == 1
        async with session.fork(turn=1) as fork:
            assert (await fork.get()).turns == 1
        with pytest.raises(NotFound):
            await fork.get()
    with pytest.raises(NotFound):
        await session.get()
    kept = await async_client.session()
    async with async_client.attach(kept.id) as attached:
        assert (await attached.memory()).length == 0
    await kept.delete()
    async with async_client.session() as deleted:
        await deleted.delete()


async def test_a_turn_is_streamed_as_typed_events(async_client: AsyncKvrecallClient) -> None:
    async with async_client.session() as session:
        async with session.stream("hi", key="k") as stream:
            events = [event async for event in stream]
        assert events[0] == TextDelta("ok ")
        assert isinstance(events[-1], TurnCompleted)
        assert events[-1].turn == stream.turn
        assert await session.stream("hi", key="k").read() == stream.turn


async def test_a_recorded_tool_call_is_paused_and_resumed_by_its_result(
    async_client: AsyncKvrecallClient,
) -> None:
    async with async_client.session(research={"repair_rows": 8}) as session:
        await session.say(RECORDED_CALL, generate=False)
        await session.tool_started("c1")
        await session.tool_delta("c1", "7", index=0)
        assert (await session.tool_result("c1", "7")).outstanding == ()
        assert (await session.say(wait_for_repairs=True)).turn == 2
        assert [repair.trigger for repair in await session.repairs(1)] == ["tool_result"]
        assert (await session.episodes()).episodes == ()


async def test_problems_and_failed_connections_are_raised(
    async_client: AsyncKvrecallClient,
) -> None:
    async with async_client.session() as session:
        with pytest.raises(InvalidRequest, match="empty_turn"):
            await session.stream([]).read()
        with pytest.raises(InvalidRequest) as caught:
            await session.say("hi", temperature=3)
        assert caught.value.details["field"] == "temperature"
    async with AsyncKvrecallClient("http://127.0.0.1:1", max_retries=1) as unreachable:
        assert not await unreachable.ready()
        with pytest.raises(ConnectionFailed):
            await unreachable.turn("s_1", "hi")


async def test_a_write_whose_response_was_lost_is_retried_and_runs_once(
    async_client: AsyncKvrecallClient, live_url: str, async_flaky_transport: Callable[[int], Any]
) -> None:
    session = await async_client.create_session()
    transport = async_flaky_transport(1)
    async with AsyncKvrecallClient(live_url, max_retries=1, transport=transport) as flaky:
        assert (await flaky.turn(session, "hi")).turn == 1
    keys = [request.headers["Idempotency-Key"] for request in transport.requests]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert (await async_client.get_session(session)).turns == 1


async def test_sessions_are_used_concurrently(async_client: AsyncKvrecallClient) -> None:
    async def ask() -> int:
        async with async_client.session() as session:
            return (await session.say("hi")).turn

    assert await asyncio.gather(*[ask() for _ in range(4)]) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [(KvrecallClient, AsyncKvrecallClient), (SessionHandle, AsyncSessionHandle)],
)
def test_both_clients_have_the_same_methods_and_parameters(
    blocking: type, asynchronous: type
) -> None:
    def describe(client: type) -> dict[str, list[str]]:
        return {
            name.replace("aclose", "close"): list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_")
        }

    assert describe(blocking) == describe(asynchronous)
