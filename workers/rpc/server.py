"""A worker on the network: its gRPC servicer, what a drain waits for, and the server with health and reflection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.errors import Cancelled, CannotListen, WorkerError
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

SERVICE = wire.DESCRIPTOR.services_by_name["Worker"].full_name
_MOST_MESSAGE_BYTES = (
    2000  # of an error: trailers are limited, and each byte may take three in them
)
_LAST_ANSWER_SECONDS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The worker's calls as they come over the network. A call whose client goes away is cancelled."""

    def __init__(self, calls: WorkerService) -> None:
        self._calls = calls
        self._running: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._breaking_off = False

    async def drain(self, seconds: float) -> None:
        """Begin nothing new, and return when what runs has ended; what still runs after `seconds` is broken off."""
        self._draining = True
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=seconds)
        if late:
            structlog.get_logger(__name__).warning(
                "calls are broken off", calls=len(late), seconds=seconds
            )
            self._breaking_off = True
            for task in late:
                task.cancel()
            await asyncio.wait(late)

    async def Describe(self, request: Empty, context: Context) -> wire.WorkerInfo:
        """Model, shape and limits."""
        async with _answering(context):
            return self._calls.describe()

    async def Retain(self, request: wire.RetainRequest, context: Context) -> Empty:
        """Drop the rows of sessions that are not named."""
        async with _answering(context):
            await self._calls.retain(request)
            return Empty()

    async def Open(self, request: wire.OpenRequest, context: Context) -> wire.MemoryReport:
        """Make a session be what the request says."""
        async with self._working(context):
            return await self._calls.open(request)

    async def Fork(self, request: wire.ForkRequest, context: Context) -> wire.ForkResult:
        """Make a session that begins as another one was."""
        async with self._working(context):
            return await self._calls.fork(request)

    async def Rebuild(self, request: wire.RebuildRequest, context: Context) -> wire.RebuildResult:
        """Compute a session's lost pages again."""
        async with self._working(context):
            return await self._calls.rebuild(request)

    async def Release(self, request: wire.ReleaseRequest, context: Context) -> Empty:
        """Let a session go that goes on elsewhere."""
        async with _answering(context):
            await self._calls.release(request)
            return Empty()

    async def Turn(self, request: wire.TurnRequest, context: Context) -> None:
        """Run a turn, written to the stream as it is said."""
        async with self._working(context), aclosing(self._calls.turn(request)) as events:
            async for event in events:
                await context.write(event)

    async def Repair(self, request: wire.RepairRequest, context: Context) -> None:
        """Run a repair; told that it is taken, its client may hurry it."""
        async with self._working(context):
            repair = asyncio.ensure_future(self._calls.repair(request))
            try:
                await context.write(wire.RepairEvent(taken=True))
                await context.write(wire.RepairEvent(result=await repair))
            finally:
                repair.cancel()

    async def Hurry(self, request: wire.HurryRequest, context: Context) -> Empty:
        """End a session's repairs."""
        async with _answering(context):
            await self._calls.hurry(request)
            return Empty()

    async def Detokenize(
        self, request: wire.DetokenizeRequest, context: Context
    ) -> wire.DetokenizeResult:
        """The text of tokens."""
        async with _answering(context):
            return self._calls.detokenize(request)

    async def Embed(self, request: wire.EmbedRequest, context: Context) -> wire.EmbedResult:
        """Unit vectors of texts."""
        async with _answering(context):
            return await self._calls.embed(request)

    async def BuildEpisodes(
        self, request: wire.BuildEpisodesRequest, context: Context
    ) -> wire.BuildEpisodesResult:
        """Choose the rows of episodes."""
        async with self._working(context):
            return await self._calls.build_episodes(request)

    async def Memory(self, request: wire.MemoryRequest, context: Context) -> wire.MemoryReport:
        """What a session holds."""
        async with _answering(context):
            return await self._calls.memory(request)

    async def Drop(self, request: wire.DropRequest, context: Context) -> Empty:
        """Forget a session."""
        async with _answering(context):
            await self._calls.drop(request)
            return Empty()

    async def Stats(self, request: Empty, context: Context) -> wire.WorkerStats:
        """Counters."""
        async with _answering(context):
            return self._calls.stats()

    def _working(self, context: Context) -> AbstractAsyncContextManager[None]:
        """Work in a session: a drain waits for its end, and lets none begin."""

        @asynccontextmanager
        async def working() -> AsyncIterator[None]:
            async with _answering(context):
                if self._draining:
                    raise Cancelled("the worker is draining and begins nothing new")
                task = asyncio.current_task()
                assert task is not None, "a call is answered in a task of its own"
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                try:
                    yield
                except asyncio.CancelledError as error:
                    if self._breaking_off:
                        raise Cancelled("the worker stopped before this was done") from error
                    raise

        return working()


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Errors become the call's status. Of an unforeseen one the client learns kind and message, the log the rest."""
    try:
        yield
    except WorkerError as error:
        status = grpc.StatusCode[error.code.grpc_status]
        await context.abort(
            status, _message(error), trailing_metadata=((REFUSAL_CODE, error.code),)
        )
    except Exception as error:
        structlog.get_logger(__name__).exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {_message(error)}")


def _message(error: Exception) -> str:
    return str(error).encode()[:_MOST_MESSAGE_BYTES].decode(errors="ignore")


class WorkerServer:
    """A worker's address. It is bound when the server is made, and answers from `start` on.

    Raises CannotListen when the address is taken or a certificate cannot be read. To be made in a running event loop.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._server = grpc.aio.server(options=_options(settings))
        self._health = health.aio.HealthServicer()
        self._servicer: WorkerServicer | None = None
        self.address = f"{settings.listen.rpartition(':')[0]}:{_bind(self._server, settings)}"

    async def start(self, calls: WorkerService) -> None:
        """Serve these calls, and say in grpc.health.v1 that it is so."""
        self._servicer = WorkerServicer(calls)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self) -> None:
        """Drain: healthy no more, nothing new, what runs ends within `drain_seconds` or is broken off."""
        await self._health.enter_graceful_shutdown()
        if self._servicer is not None:
            await self._servicer.drain(self._settings.drain_seconds)
        # The last answers may still be on their way; whoever watches the health must not hold the stop up.
        await self._server.stop(_LAST_ANSWER_SECONDS)


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # two workers at one address would share the calls at random
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        (
            "grpc.http2.max_ping_strikes",
            0,
        ),  # how often a client asks for a sign of life is its operator's choice
    ]


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """Bind the address; returns its port. Raises CannotListen."""
    try:
        if settings.tls_cert is None or settings.tls_key is None:
            return server.add_insecure_port(settings.listen)
        chain = [(settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())]
        ca = None if settings.tls_client_ca is None else settings.tls_client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials(chain, ca, require_client_auth=ca is not None)
        return server.add_secure_port(settings.listen, credentials)
    except OSError as error:
        raise CannotListen(f"a certificate cannot be read: {error}") from error
    except RuntimeError as error:
        raise CannotListen(
            f"cannot listen on {settings.listen}: it is taken or no HOST:PORT, or the certificate does not fit its key"
        ) from error
