"""Slow, broken and greedy connections: each limit, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from gateway.http.server import server_options
from gateway.http.settings import GatewaySettings
from kvrecall.domain.sessions.request import CreateSession

# The limits under test are far below this; a test waits no longer for a connection's end.
PATIENCE_SECONDS = 60.0
MEBIBYTE = 1 << 20


@pytest.fixture
def gateway_settings() -> GatewaySettings:
    return GatewaySettings(
        max_body_bytes=2 * MEBIBYTE,
        max_body_buffer_bytes=4 * MEBIBYTE,
        body_seconds=1.0,
        header_seconds=1.0,
        keepalive_seconds=1,
        send_seconds=1.0,
        max_connections=8,
        max_header_bytes=2048,
    )


@pytest.fixture
async def port(assembled: Any, gateway_settings: GatewaySettings) -> AsyncIterator[int]:
    """Port of the application behind the server's limits."""
    config = uvicorn.Config(
        assembled.app, port=0, log_config=None, lifespan="on", **server_options(gateway_settings)
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(port: int, sent: bytes = b"") -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Everything up to the connection's end."""
    received = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            while chunk := await reader.read(65536):
                received += chunk
        except ConnectionResetError:
            pass
    return received


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one response of a kept connection; returns its status."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        received = await reader.readuntil(b"\r\n\r\n")
        lines = received.decode().lower().splitlines()
        length = next(line for line in lines if line.startswith("content-length:"))
        await reader.readexactly(int(length.partition(":")[2]))
    return int(lines[0].split()[1])


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def problem(response: bytes) -> tuple[int, str]:
    """Status and code of a problem response."""
    first, _, body = response.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)["code"]


async def is_served(port: int) -> bool:
    async with connected(port, PROBE) as (reader, _):
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_body_that_does_not_arrive_in_time_is_refused(port: int) -> None:
    async with connected(port, head("/v1/sessions", 1000) + b"{") as (reader, _):
        assert problem(await rest(reader)) == (408, "body_timeout")
    assert await is_served(port)


async def test_a_client_that_breaks_off_its_body_is_logged_as_gone(port: int) -> None:
    async with connected(port, head("/v1/sessions", 1000) + b"{"):
        await asyncio.sleep(0.1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        async with asyncio.timeout(PATIENCE_SECONDS):
            labels = 'method="POST",route="/v1/sessions",status="499"'
            gone = f"kvrecall_http_requests_total{{{labels}}} 1.0"
            while gone not in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_body_that_trickles_in_is_refused(port: int) -> None:
    async with connected(port, head("/v1/sessions", 1000)) as (reader, writer):
        ended = asyncio.create_task(rest(reader))
        while not ended.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert problem(ended.result()) == (408, "body_timeout")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost:"])
async def test_a_head_that_does_not_arrive_in_time_ends_the_connection(
    port: int, sent: bytes
) -> None:
    async with connected(port, sent) as (reader, _):
        assert await rest(reader) == b""


async def test_a_head_that_trickles_in_ends_the_connection(port: int) -> None:
    async with connected(port, b"GET /healthz HTTP/1.1\r\n") as (reader, writer):
        ended = asyncio.create_task(rest(reader))
        while not ended.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
        assert ended.result() == b""


async def test_the_second_head_of_a_connection_has_a_limit_too(port: int) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with connected(port, request + b"GET /he") as (reader, _):
        assert (await rest(reader)).count(b"HTTP/1.1") == 1


async def test_an_idle_connection_is_closed(port: int) -> None:
    async with connected(port, PROBE) as (reader, _):
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")


async def test_a_head_over_the_limit_is_refused(port: int) -> None:
    sent = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 5000
    async with connected(port, sent) as (reader, _):
        assert (await rest(reader)).startswith(b"HTTP/1.1 400")


async def test_a_connection_over_the_limit_takes_the_place_of_the_longest_idle_one(
    port: int,
) -> None:
    async with AsyncExitStack() as stack:
        kept, _ = await stack.enter_async_context(connected(port, PROBE))
        assert await read_answer(kept) == 200
        idle = [(await stack.enter_async_context(connected(port)))[0] for _ in range(7)]
        await asyncio.sleep(0.1)
        assert await is_served(port)
        assert await rest(kept) == b"", "it has had its answer, and asked for nothing since"
        assert not any(reader.at_eof() for reader in idle)


async def test_idle_connections_keep_no_probe_out(port: int) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(20):
            for _ in range(8):
                await stack.enter_async_context(connected(port))
            assert await is_served(port)


async def test_where_all_connections_have_requests_probes_alone_are_served(port: int) -> None:
    unfinished = head("/v1/sessions", 1000) + b"{"
    other = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(connected(port, unfinished))
        await asyncio.sleep(0.1)
        refused, _ = await stack.enter_async_context(connected(port, other))
        assert problem(await rest(refused)) == (429, "overloaded")
        for _ in range(4):
            assert await is_served(port)


async def test_so_many_connections_wait_for_a_probe_and_no_more(port: int) -> None:
    unfinished = head("/v1/sessions", 1000) + b"{"
    async with AsyncExitStack() as stack:
        sent = [unfinished] * 50
        readers = [(await stack.enter_async_context(connected(port, each)))[0] for each in sent]
        refused = [problem(await rest(reader)) for reader in readers]
    assert refused.count((429, "overloaded")) == 50 - 8
    assert await is_served(port)


async def test_of_too_many_bodies_the_oldest_is_refused_and_a_quick_one_served(port: int) -> None:
    # Just under the limit of one body; the third does not fit beside two.
    slow = head("/v1/sessions", 2 * MEBIBYTE) + b" " * (2 * MEBIBYTE - 100)
    async with connected(port, slow) as (first, _), connected(port, slow) as (second, _):
        await asyncio.sleep(0.3)
        body = json.dumps({"budget": 64, "metadata": {"a": "b"}}).encode()
        quick = head("/v1/sessions", len(body) + 1000) + body + b" " * 1000
        async with connected(port, quick) as (reader, _):
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert (await reader.readline()).startswith(b"HTTP/1.1 201")
        codes = [problem(await rest(reader)) for reader in (first, second)]
        assert codes == [(429, "overloaded"), (408, "body_timeout")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/nothing", (404, "unknown_route")),
        ("/healthz", (405, "method_not_allowed")),
        ("/v1/sessions/{session}/fork", (404, "unknown_session")),
        ("/v1/sessions/{session}/events", (404, "unknown_session")),
    ],
)
async def test_route_and_tenant_are_checked_before_the_body_is_received(
    assembled: Any, port: int, path: str, expected: tuple[int, str]
) -> None:
    session = await assembled.service.create(CreateSession(tenant="ann"))
    sent = head(path.format(session=session.id), 1000, "X-Kvrecall-Tenant: ben")
    async with connected(port, sent + b"{") as (reader, _):
        assert problem(await rest(reader)) == expected


async def test_a_refused_body_is_discarded_so_that_the_answer_is_read(
    assembled: Any, port: int
) -> None:
    session = await assembled.service.create(CreateSession(tenant="ann"))
    path, body = f"/v1/sessions/{session.id}/fork", b"{" * MEBIBYTE
    async with connected(port, head(path, len(body), "X-Kvrecall-Tenant: ben")) as (reader, writer):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"404 Not Found" in answer
        writer.write(body)
        await writer.drain()
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert b"unknown_session" in await reader.readexactly(length)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"alive" in await rest(reader)


async def test_requests_behind_a_refused_body_have_time_of_their_own(
    assembled: Any, port: int
) -> None:
    session = await assembled.service.create(CreateSession(tenant="ann"))
    refused = head(f"/v1/sessions/{session.id}/fork", 2, "X-Kvrecall-Tenant: ben")
    read = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with connected(port, refused) as (reader, writer):
        answers = []
        for sent in (b"{}" + refused, b"{}" + read, read, read):
            answers.append(await read_answer(reader))
            await asyncio.sleep(0.4)  # all together longer than a refused body may take
            writer.write(sent)
        answers.append(await read_answer(reader))
    assert answers == [404, 404, 200, 200, 200]


async def test_a_refused_body_that_is_too_long_ends_the_connection(
    assembled: Any, port: int
) -> None:
    session = await assembled.service.create(CreateSession(tenant="ann"))
    path = f"/v1/sessions/{session.id}/fork"
    sent = head(path, 2 * MEBIBYTE, "X-Kvrecall-Tenant: ben") + b"{"
    endless = sent.replace(b"Content-Length: %d" % (2 * MEBIBYTE), b"Content-Length: 1000000000")
    assert endless != sent
    async with connected(port, endless) as (reader, writer):
        assert b"404" in await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(ConnectionError):
            await _send_until_cut(writer, b"{" * 65536)


async def test_a_response_that_is_not_read_ends_the_connection(port: int) -> None:
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    async with connected(port) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            await _send_until_cut(writer, request)
        del reader
    assert await is_served(port)


async def _send_until_cut(writer: asyncio.StreamWriter, request: bytes) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:  # responses fill all buffers in between
            writer.write(request)
            await writer.drain()
            await asyncio.sleep(0.001)
