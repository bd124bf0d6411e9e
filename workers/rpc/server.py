"""A worker on the network: gRPC servicer with drain, server with health and reflection."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrecall.protocol.calls import CALLS, SERVICE, Call
from kvrecall.protocol.certificates import CannotBind, bind
from kvrecall.protocol.v1 import REFUSAL_CODE
from kvrecall.telemetry.spans import Tracer
from kvrecall.telemetry.wire import PassingTracer
from workers.errors import Cancelled, CannotListen, MalformedMessage, WorkerError
from workers.rpc.authentication import (
    TokenInterceptor,
    listens_on_loopback,
    require_authentication,
)
from workers.rpc.observation import ObservedCall, observe_call
from workers.rpc.refusals import refusing
from workers.rpc.settings import ServerSettings

if TYPE_CHECKING:
    # It takes seconds to import: an address in use is refused before.
    from workers.rpc.service import WorkerService

# Trailers are limited in size, and each byte of a message may take three in them.
_MAX_MESSAGE_BYTES = 2000
_LAST_ANSWER_SECONDS = 1.0
_log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer:
    """Answers the table's calls over gRPC. A call is cancelled if its client goes away."""

    def __init__(self, service: "WorkerService", tracer: Tracer) -> None:
        self._service = service
        self._metrics = service.metrics
        self._tracer = tracer
        self._running: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._cancelling = False

    def build_handler(self) -> grpc.GenericRpcHandler:
        """Build the gRPC handler of all calls."""
        handlers = {call.name: self._build_method_handler(call) for call in CALLS}
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    @property
    def draining(self) -> bool:
        """True from the beginning of a drain on."""
        return self._draining

    async def drain(self, seconds: float) -> None:
        """Refuse new work and wait for running calls; cancel those that run after `seconds`."""
        self._draining = True
        self._metrics.set("worker_draining", 1.0)
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=seconds)
        if late:
            _log.warning("drain cancels calls", calls=len(late), seconds=seconds)
            self._cancelling = True
            for task in late:
                task.cancel()
            await asyncio.wait(late)

    def _build_method_handler(self, call: Call[Any, Any]) -> "grpc.RpcMethodHandler[Any, Any]":
        async def answer(data: bytes, context: Context) -> Any:
            async with self._guard(call, data, context) as (request, _):
                return await self._service.handler(call)(request)

        async def stream(data: bytes, context: Context) -> None:
            async with (
                self._guard(call, data, context) as (request, observed),
                aclosing(self._service.stream_handler(call)(request)) as events,
            ):
                async for event in events:
                    observed.add_event(event)
                    await context.write(event)

        build = (
            grpc.unary_stream_rpc_method_handler
            if call.streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return build(
            stream if call.streaming else answer,
            response_serializer=call.response.SerializeToString,
        )

    @asynccontextmanager
    async def _guard(
        self, call: Call[Any, Any], data: bytes, context: Context
    ) -> AsyncIterator[tuple[Any, ObservedCall]]:
        """Read the request; count, log and trace its call, map errors, and track a drained one."""
        metadata = {name: str(value) for name, value in context.invocation_metadata() or ()}
        observed = ObservedCall()
        async with AsyncExitStack() as stack:
            stack.enter_context(self._count(call, context, observed))
            await stack.enter_async_context(_map_errors(context))
            request = _read(call, data)
            stack.enter_context(observe_call(self._tracer, call, request, metadata, observed))
            if call.drained:
                await stack.enter_async_context(self._track_running())
            yield request, observed

    @contextmanager
    def _count(
        self, call: Call[Any, Any], context: Context, observed: ObservedCall
    ) -> Iterator[None]:
        """Count the call by its status; one whose client went away before its answer is CANCELLED."""
        began = time.perf_counter()
        code = "CANCELLED"
        try:
            yield
            code = "OK"
        except grpc.aio.AbortError:
            code = grpc.StatusCode(context.code()).name
            raise
        except asyncio.CancelledError:
            code = "OK" if observed.answered else code
            raise
        finally:
            self._metrics.inc("worker_calls_total", method=call.name, code=code)
            seconds = time.perf_counter() - began
            self._metrics.observe("worker_call_seconds", seconds, method=call.name)

    @asynccontextmanager
    async def _track_running(self) -> AsyncIterator[None]:
        """Let a drain wait for the current task. Raises Cancelled while the worker drains."""
        if self._draining:
            raise Cancelled("the worker is draining and accepts no new work")
        task = asyncio.current_task()
        assert task is not None, "a call is answered in a task of its own"
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            yield
        except asyncio.CancelledError as error:
            if self._cancelling:
                raise Cancelled("the worker stopped before the call ended") from error
            raise


def _read(call: Call[Any, Any], data: bytes) -> Any:
    """Read a call's request. Raises MalformedMessage: gRPC itself would log it as our error."""
    try:
        return call.request.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(
            f"{len(data)} bytes are no {call.request.DESCRIPTOR.full_name}"
        ) from error


@asynccontextmanager
async def _map_errors(context: Context) -> AsyncIterator[None]:
    """Map errors to the call's status, with the code that tells a refusal from a lost worker."""
    try:
        with refusing():
            yield
    except WorkerError as error:
        status = grpc.StatusCode[error.code.grpc_status]
        await context.abort(
            status, _to_message(error), trailing_metadata=((REFUSAL_CODE, error.code),)
        )


def _to_message(error: Exception) -> str:
    return str(error).encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


class WorkerServer:
    """A worker's gRPC server. Its address is bound on creation; it answers from `start` on.

    Raises CannotListen if the address is in use, a certificate cannot be read, or other machines
    could call it without a token or certificate. Create it in a running event loop.
    """

    def __init__(self, settings: ServerSettings, tracer: Tracer | None = None) -> None:
        require_authentication(settings)
        self._settings = settings
        self._tracer = tracer or PassingTracer()
        self._server = grpc.aio.server(
            interceptors=_build_interceptors(settings), options=_options(settings)
        )
        self._health = health.aio.HealthServicer()
        self._servicer: WorkerServicer | None = None
        self.address = f"{settings.listen.rpartition(':')[0]}:{_bind(self._server, settings)}"

    async def start(self, service: "WorkerService") -> None:
        """Serve the calls of `service`, and report SERVING in grpc.health.v1."""
        self._servicer = WorkerServicer(service, self._tracer)
        self._server.add_generic_rpc_handlers((self._servicer.build_handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._reflects:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    @property
    def ready(self) -> bool:
        """True while the worker takes new work."""
        return self._servicer is not None and not self._servicer.draining

    @property
    def _reflects(self) -> bool:
        if self._settings.reflection is None:
            return listens_on_loopback(self._settings)
        return self._settings.reflection

    async def stop(self) -> None:
        """Drain: report NOT_SERVING, refuse new work, cancel what runs after `drain_seconds`."""
        await self._health.enter_graceful_shutdown()
        if self._servicer is not None:
            await self._servicer.drain(self._settings.drain_seconds)
        # The last answers may still be in flight; a watcher of the health must not delay the stop.
        await self._server.stop(_LAST_ANSWER_SECONDS)


def _build_interceptors(settings: ServerSettings) -> list[grpc.aio.ServerInterceptor]:
    return [] if settings.token is None else [TokenInterceptor(settings.token.get_secret_value())]


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # two workers at one address would share its calls at random
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),  # clients choose how often they ping
    ]


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """Bind the address; returns its port. Raises CannotListen."""
    try:
        return bind(server, settings.listen, settings)
    except CannotBind as error:
        raise CannotListen(str(error)) from error
