"""The connection to Redis that all tasks share: whose reply is whose, and what happens without one."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from kvrecall_server.app.redis import redis_client
from services.catalog.redis.connection.shared import SharedConnection

Connect = Callable[..., SharedConnection]


@pytest.fixture
def server(redis_process: Callable[..., Any]) -> Any:
    return redis_process()


@pytest.fixture
def connect(server: Any) -> Connect:
    """connect(url=..., seconds=..., timeout=...): a shared connection to the server."""

    def build(
        url: str = server.url, seconds: float = 10.0, timeout: float = 5.0
    ) -> SharedConnection:
        client = redis_client(url, timeout)
        assert isinstance(client, redis.asyncio.Redis)
        return SharedConnection(client.connection_pool, seconds)

    return build


async def test_tasks_that_ask_at_once_share_a_round_trip_and_get_their_own_replies(
    server: Any, connect: Connect
) -> None:
    shared = connect()
    await shared.run([("MSET", *(word for n in range(100) for word in (f"k{n}", n)))])
    before = server.client.info("stats")["total_reads_processed"]
    found = await asyncio.gather(
        *(shared.run([("GET", f"k{n}"), ("STRLEN", f"k{n}")]) for n in range(100))
    )
    after = server.client.info("stats")["total_reads_processed"]
    assert found == [[str(n).encode(), len(str(n))] for n in range(100)]
    assert after - before < 10  # those of the connections that ask for it are among them


async def test_an_error_is_raised_to_the_task_whose_command_failed(connect: Connect) -> None:
    shared = connect()
    failing = asyncio.create_task(shared.run([("SET", "k", 1), ("LPUSH", "k", 2)]))
    reading = asyncio.create_task(shared.run([("GET", "k")]))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await failing
    assert await reading == [b"1"]


async def test_the_reply_to_a_cancelled_task_is_nobody_elses(connect: Connect) -> None:
    shared = connect()
    await shared.run([("MSET", "one", 1, "two", 2)])
    first = asyncio.create_task(shared.run([("GET", "one")]))
    second = asyncio.create_task(shared.run([("GET", "two")]))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [b"2"]
    assert await shared.run([("GET", "one")]) == [b"1"]


async def test_a_silent_server_is_given_up_in_time_and_asked_again_later(
    server: Any, connect: Connect
) -> None:
    shared = connect(seconds=0.2)
    await shared.run([("PING",)])
    server.signal(signal.SIGSTOP)
    asked = [shared.run([("GET", "k")]) for _ in range(3)]
    assert {type(each) for each in await asyncio.gather(*asked, return_exceptions=True)} == {
        TimeoutError
    }
    server.signal(signal.SIGCONT)
    assert await shared.run([("GET", "k")]) == [None]


async def test_a_lost_connection_fails_what_waits_and_is_made_anew(
    server: Any, connect: Connect
) -> None:
    shared = connect()
    (own,) = await shared.run([("CLIENT", "ID")])
    waiting = asyncio.create_task(shared.run([("BLPOP", "nothing", 0)]))
    await asyncio.sleep(0.05)
    server.client.client_kill_filter(_id=own)
    with pytest.raises(ConnectionError):
        await waiting
    (other,) = await shared.run([("CLIENT", "ID")])
    assert other != own


async def test_the_connection_to_a_primary_that_was_demoted_is_made_anew(
    server: Any, connect: Connect
) -> None:
    shared = connect()
    (own,) = await shared.run([("CLIENT", "ID")])
    server.client.replicaof("127.0.0.1", 1)
    asked = [shared.run([("SET", "k", 1)]) for _ in range(2)]
    for failed in await asyncio.gather(*asked, return_exceptions=True):
        assert "READONLY" in str(failed)
    (other,) = await shared.run([("CLIENT", "ID")])
    assert other != own
    assert await shared.run([("CLIENT", "ID")]) == [other]


async def test_a_closed_connection_ends_with_its_last_reply(server: Any, connect: Connect) -> None:
    shared = connect()
    (own,) = await shared.run([("CLIENT", "ID")])
    waiting = asyncio.create_task(shared.run([("BLPOP", "list", 0)]))
    await asyncio.sleep(0.05)
    shared.close()
    server.client.rpush("list", "x")
    assert await waiting == [[b"list", b"x"]]
    while any(int(each["id"]) == own for each in server.client.client_list()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_tasks_wait_together_for_a_server_that_does_not_answer(
    server: Any, connect: Connect
) -> None:
    before = server.client.info("stats")["total_connections_received"]
    server.signal(signal.SIGSTOP)
    shared = connect(timeout=0.2)
    asked = [shared.run([("PING",)]) for _ in range(20)]
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(each) for each in failed} <= {TimeoutError, ConnectionError}
    server.signal(signal.SIGCONT)
    assert await shared.run([("PING",)]) == [b"PONG"]
    after = server.client.info("stats")["total_connections_received"]
    assert after - before == 3  # the attempt, the new one, and that of this question


async def test_redis_py_sets_the_connection_up(server: Any, connect: Connect) -> None:
    server.client.config_set("requirepass", "secret")
    url = f"redis://:secret@127.0.0.1:{server.port}/3"
    (info,) = await connect(url).run([("CLIENT", "INFO")])
    assert " db=3 " in info.decode()
    # Redis 7.0 refuses the first command, others the set-up of the connection before it.
    refusals = (redis.AuthenticationError, redis.ResponseError)
    with pytest.raises(refusals, match="Authentication required"):
        await connect().run([("PING",)])
