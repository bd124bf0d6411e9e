"""Authentication of a worker's clients: the shared token, and the refusal to start without."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from pydantic import SecretStr

from kvrecall.protocol.calls import CALLS, SERVICE, Call
from kvrecall.protocol.v1 import TOKEN_KEY, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import CannotListen
from workers.model.embedder import Embedder
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.server import WorkerServer
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

TOKEN = "a secret of the cluster"


@pytest.fixture
def channel_to(make_worker: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """channel_to(**settings): connect to a server of a tiny model."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[grpc.aio.Channel]:
        server = WorkerServer(ServerSettings(**{"listen": "127.0.0.1:0", **settings}))
        binding = CatalogBinding(tmp_path / "catalog-id")
        await server.start(WorkerService(make_worker().scheduler, Embedder(), "tiny", binding))
        port = server.address.rpartition(":")[2]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        await server.stop()

    return serve


async def status_of(call: Any) -> grpc.StatusCode:
    """Status of a unary call, or of the first answer of a stream."""
    try:
        if hasattr(call, "read"):
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def send(channel: grpc.aio.Channel, call: Call[Any, Any], **options: Any) -> Any:
    """Make a call of the table with an empty request."""
    method = channel.unary_stream if call.streaming else channel.unary_unary
    stub = method(
        f"/{SERVICE}/{call.name}",
        request_serializer=call.request.SerializeToString,
        response_deserializer=call.response.FromString,
    )
    return stub(call.request(), **options)


@pytest.mark.parametrize("given", [None, "", "another secret of the cluster", TOKEN[:-1], "\x01"])
async def test_a_call_without_the_token_is_refused(
    channel_to: Callable[..., Any], given: str | None
) -> None:
    metadata: tuple[tuple[str, str | bytes], ...]
    metadata = () if given is None else ((TOKEN_KEY, given),)
    if given == "\x01":
        metadata = ((f"{TOKEN_KEY}-bin", b"\x01"),)
    async with channel_to(token=TOKEN, reflection=True) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        calls = [
            *(send(channel, call, metadata=metadata) for call in CALLS),
            health.Check(health_pb2.HealthCheckRequest(), metadata=metadata),
            # Nothing is written: a refusal that comes before a write makes the client's own error.
            reflection.ServerReflectionInfo(metadata=metadata, timeout=30),
        ]
        assert [await status_of(call) for call in calls] == [
            grpc.StatusCode.UNAUTHENTICATED for _ in calls
        ]


async def test_a_call_without_the_token_is_refused_before_its_request_is_read(
    channel_to: Callable[..., Any],
) -> None:
    async with channel_to(token=TOKEN, max_message_bytes=1 << 20) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        request = pb.DetokenizeRequest(chunks=[pb.TokenChunk(text="a" * (2 << 20))])
        unauthenticated = await status_of(stub.Detokenize(request))
        authenticated = await status_of(stub.Detokenize(request, metadata=((TOKEN_KEY, TOKEN),)))
        assert unauthenticated is grpc.StatusCode.UNAUTHENTICATED
        assert authenticated is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_with_the_token_is_answered(channel_to: Callable[..., Any]) -> None:
    async with channel_to(token=TOKEN) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = await stub.Describe(Empty(), metadata=((TOKEN_KEY, TOKEN),))
        assert info.model == "tiny"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "worker-host:0", "10.1.2.3:0"])
async def test_a_worker_off_loopback_does_not_start_unprotected(listen: str) -> None:
    with pytest.raises(CannotListen, match=r"KVRECALL_SERVER__TOKEN.*--tls-client-ca"):
        WorkerServer(ServerSettings(listen=listen))


async def test_tls_without_client_certificates_does_not_protect(tmp_path: Path) -> None:
    settings = ServerSettings(
        listen="0.0.0.0:0", tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"
    )
    with pytest.raises(CannotListen, match="KVRECALL_SERVER__TOKEN"):
        WorkerServer(settings)


@pytest.mark.parametrize(
    ("listen", "reflection", "expected"),
    [
        ("127.0.0.1:0", None, grpc.StatusCode.OK),
        ("127.0.0.1:0", False, grpc.StatusCode.UNIMPLEMENTED),
        ("0.0.0.0:0", None, grpc.StatusCode.UNIMPLEMENTED),
        ("0.0.0.0:0", True, grpc.StatusCode.OK),
    ],
)
async def test_reflection_is_for_loopback_or_on_demand(
    channel_to: Callable[..., Any], listen: str, reflection: bool | None, expected: grpc.StatusCode
) -> None:
    async with channel_to(listen=listen, token=TOKEN, reflection=reflection) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        # Nothing is asked: a message that is on its way while a server refuses the call is an error
        # of its own to the client.
        call = stub.ServerReflectionInfo(iter(()), metadata=((TOKEN_KEY, TOKEN),))
        assert await status_of(call) is expected


def test_a_token_is_never_printed() -> None:
    assert TOKEN not in repr(ServerSettings(token=SecretStr(TOKEN)))
