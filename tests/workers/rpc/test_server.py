"""A worker on the network: its health, its refusals, cancelled calls, and a drain."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrecall.protocol.calls import SERVICE
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import CannotListen, UnknownSession
from workers.model.embedder import Embedder
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.server import WorkerServer
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Served:
    """A worker, its server, and a client's connection to it."""

    def __init__(self, worker: Any, calls: WorkerService, server: WorkerServer) -> None:
        self.worker = worker
        self.calls = calls
        self.server = server
        self.channel = grpc.aio.insecure_channel(server.address)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)

    async def health(self) -> int:
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(asked)).status

    def turn(self, tokens: int) -> Any:
        """A turn of session "s" that generates so many tokens, as nothing stops the tiny model."""
        said = [pb.Message(role="user", content="Where does she live?")]
        sampling = pb.Sampling(max_tokens=tokens)
        return self.stub.Turn(
            pb.TurnRequest(session="s", epoch=1, messages=said, generate=True, sampling=sampling)
        )


class Broken(WorkerService):
    """A service with a bug in one of its calls."""

    async def stats(self, request: Empty) -> pb.WorkerStats:
        raise ZeroDivisionError("rows per nothing")


@pytest.fixture
def served(make_worker: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """served(calls=WorkerService, **settings).

    A tiny model on the network, with an open session "s".
    """

    @asynccontextmanager
    async def serve(
        calls: type[WorkerService] = WorkerService, **settings: Any
    ) -> AsyncIterator[Served]:
        worker = make_worker()
        worker.open("s", method="streaming_llm", budget=64)
        server = WorkerServer(ServerSettings(listen="127.0.0.1:0", **settings))
        answering = calls(
            worker.scheduler, Embedder(), "tiny", CatalogBinding(tmp_path / "catalog-id")
        )
        await server.start(answering)
        each = Served(worker, answering, server)
        try:
            yield each
        finally:
            await each.channel.close()
            await server.stop()

    return serve


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, our code and message of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    metadata = refused.value.trailing_metadata() or {}
    return refused.value.code(), str(metadata.get(REFUSAL_CODE, "")), refused.value.details() or ""


async def _end(turn: AsyncIterator[pb.TurnEvent]) -> None:
    """Read what is left of a turn."""
    async for _ in turn:
        pass


async def test_health_and_reflection_describe_the_worker(served: Callable[..., Any]) -> None:
    async with served() as each:
        assert await each.health() == SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(each.channel)
        (services,) = [answer async for answer in stub.ServerReflectionInfo(iter([ask]))]
        names = {service.name for service in services.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_refusal_has_a_status_our_code_and_a_message(served: Callable[..., Any]) -> None:
    async with served() as each:
        status, code, message = await refusal(each.stub.Memory(pb.MemoryRequest(session="unknown")))
        assert (status, code) == (grpc.StatusCode.NOT_FOUND, "session_not_open")
        assert "unknown" in message
        spec = pb.SessionSpec(session="s2", epoch=1, method="none such", budget=64)
        status, code, _ = await refusal(each.stub.Open(pb.OpenRequest(spec=spec)))
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "unknown_method")


@pytest.mark.parametrize("method", ["Stats", "Memory", "Turn"])
async def test_bytes_that_are_no_request_are_refused_and_are_no_error_of_the_worker(
    served: Callable[..., Any], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as each:
        call = each.channel.unary_unary(f"/{SERVICE}/{method}")(b"\x0f5")
        status, code, message = await refusal(call)
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "malformed_message")
        assert "2 bytes" in message
        assert not [line for line in caplog.records if line.levelname == "ERROR"]


@pytest.mark.parametrize("field", [{"template_arguments": "{"}, {"tools": ["hi"]}])
async def test_text_that_is_no_json_is_refused_where_tokens_are_counted(
    served: Callable[..., Any], field: dict[str, Any]
) -> None:
    request = pb.TokenizeRequest(messages=[pb.Message(role="user", content="hi")], **field)
    async with served() as each:
        status, code, _ = await refusal(each.stub.Tokenize(request))
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_settings")


async def test_a_message_too_long_for_trailers_is_truncated(served: Callable[..., Any]) -> None:
    async with served() as each:
        status, code, message = await refusal(
            each.stub.Memory(pb.MemoryRequest(session="ü" * 50_000))
        )
        assert (status, code) == (grpc.StatusCode.NOT_FOUND, "session_not_open")
        assert "ü" * 900 in message


async def test_an_unexpected_error_has_a_code_and_its_kind_but_not_its_text(
    served: Callable[..., Any],
) -> None:
    async with served(Broken) as each:
        status, code, message = await refusal(each.stub.Stats(Empty()))
        assert (status, code) == (grpc.StatusCode.UNKNOWN, "worker_error")
        assert "ZeroDivisionError" in message
        assert "rows per nothing" not in message


@pytest.mark.parametrize("how", ["cancelled", "gone"])
async def test_a_turn_ends_when_its_client_is_gone(served: Callable[..., Any], how: str) -> None:
    async with served() as each:
        turn = each.turn(tokens=100_000)
        assert (await turn.read()).HasField("planned")
        assert (await turn.read()).token.ids
        if how == "cancelled":
            turn.cancel()
        else:
            await each.channel.close()
        # A session's turns follow each other: this one begins when that one has ended, and finds
        # what it left.
        with pytest.raises(UnknownSession, match="in the middle of a turn"):
            await asyncio.wrap_future(each.worker.submit("s", "Hello."))


async def test_a_drain_waits_for_running_turns_and_refuses_new_ones(
    served: Callable[..., Any],
) -> None:
    async with served(drain_seconds=300) as each:
        watched = health_pb2_grpc.HealthStub(each.channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        turn = aiter(each.turn(tokens=300))
        await anext(turn)
        assert (await watched.read()).status == SERVING
        stopping = asyncio.create_task(each.server.stop())
        assert (await watched.read()).status == await each.health() == NOT_SERVING
        status, code, message = await refusal(each.turn(tokens=1).read())
        assert (status, code) == (grpc.StatusCode.ABORTED, "cancelled")
        assert "draining" in message
        await each.stub.StopEarly(pb.StopEarlyRequest(session="s"))
        events = [event async for event in turn]
        assert events[-1].done.output_tokens == 300
        await stopping


async def test_a_drain_cancels_calls_that_take_too_long(served: Callable[..., Any]) -> None:
    async with served(drain_seconds=0.1) as each:
        turn = aiter(each.turn(tokens=100_000))
        await anext(turn)
        await each.server.stop()
        _, code, message = await refusal(_end(turn))
        assert (code, message) == ("cancelled", "the worker stopped before the call ended")
        with pytest.raises(UnknownSession, match="in the middle of a turn"):
            await asyncio.wrap_future(each.worker.submit("s", "Hello."))


async def test_an_address_that_is_taken_or_none_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "nowhere"):
            with pytest.raises(CannotListen, match="cannot listen"):
                WorkerServer(ServerSettings(listen=address))


async def test_two_workers_cannot_share_an_address() -> None:
    first = WorkerServer(ServerSettings(listen="127.0.0.1:0"))
    with pytest.raises(CannotListen, match="in use"):
        WorkerServer(ServerSettings(listen=first.address))
    await first.stop()


async def test_certificates_that_cannot_be_read_or_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="cannot be read"):
        WorkerServer(
            ServerSettings(listen="127.0.0.1:0", tls_cert=tmp_path / "a", tls_key=tmp_path / "b")
        )
    for name in ("a", "b"):
        (tmp_path / name).write_text("no certificate")
    with pytest.raises(CannotListen, match="certificate"):
        WorkerServer(
            ServerSettings(listen="127.0.0.1:0", tls_cert=tmp_path / "a", tls_key=tmp_path / "b")
        )


def test_half_of_a_pair_of_certificate_and_key_is_refused(tmp_path: Path) -> None:
    halves: list[dict[str, Any]] = [
        {"tls_cert": tmp_path},
        {"tls_key": tmp_path},
        {"tls_client_ca": tmp_path},
    ]
    for half in halves:
        with pytest.raises(ValueError, match="tls_cert"):
            ServerSettings(**half)
