"""A worker in a process of its own, reached over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol import calls
from kvrecall.protocol.calls import Call, RequestT, ResponseT
from kvrecall.protocol.certificates import read_channel
from kvrecall.protocol.v1 import REFUSAL_CODE, TOKEN_KEY, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import Span, current_span, get_error_code
from kvrecall.telemetry.wire import write_ids
from services.cancellation import run_to_completion
from services.cluster.settings import WireSettings
from services.cluster.worker_client import WorkerCalls

_FIRST_RECONNECT_MS = 100
_CONNECTION_ATTEMPT_MS = 5000


class GrpcWorkerClient(WorkerCalls):
    """`services.cluster.worker_client.Worker` at an address. Lost connections are restored.

    Raises OSError when a certificate cannot be read. Create it in a running event loop.
    """

    def __init__(self, settings: WireSettings, catalog: str = "") -> None:
        self._settings = settings
        self.catalog = catalog
        self.address = settings.address
        self._channel = _open_channel(settings)
        self._metadata = _build_metadata(settings)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # First events that streaming calls wait for, by name of the call and session.
        self._unanswered: dict[tuple[str, str], set[asyncio.Event]] = {}

    async def describe(self) -> pb.WorkerInfo:
        """See `Worker.describe`; waits `look_seconds` for a worker that is still starting."""
        with self._map_errors():
            info: pb.WorkerInfo = await self._stub.Describe(
                pb.DescribeRequest(catalog=self.catalog),
                timeout=self._settings.look_seconds,
                wait_for_ready=True,
                metadata=self._metadata,
            )
        return info

    def choose_worker(
        self, session: str, owner: str, avoid: Sequence[str] = (), family: str = ""
    ) -> str:
        """Choose this worker. Raises WorkerLost if it is to be avoided."""
        if self.address in avoid:
            raise WorkerLost(f"there is no worker but {self.address}")
        return self.address

    def forget(self, session: str) -> None:
        """Do nothing: a client of one worker keeps nothing of a session."""

    async def workers(self) -> list[pb.WorkerRecord]:
        """This worker's record."""
        return [await self.record(self.address, await self.describe())]

    async def record(self, name: str, info: pb.WorkerInfo) -> pb.WorkerRecord:
        """Build the worker's record from its load and health, asked for within `look_seconds`."""
        stats = await self.call(calls.STATS, Empty())
        with self._map_errors():
            health = await self._health.Check(
                health_pb2.HealthCheckRequest(),
                timeout=self._settings.look_seconds,
                metadata=self._metadata,
            )
        return pb.WorkerRecord(
            name=name,
            address=self.address,
            model=info.model,
            fingerprint=info.fingerprint,
            slots=info.slots,
            free_slots=info.slots - stats.slots_in_use,
            queued=stats.queued,
            sessions=stats.sessions,
            draining=health.status != health_pb2.HealthCheckResponse.SERVING,
            protocol_version=info.protocol_version,
        )

    async def stats(self) -> dict[str, pb.WorkerStats]:
        """See `Worker.stats`."""
        return {self.address: await self.call(calls.STATS, Empty())}

    async def call(self, call: Call[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """See `WorkerCalls.call`."""
        if call.follows is not None and call.session is not None:
            await self._wait_answered(call.follows.name, call.session(request))
        sent = self._send(call, request)
        return await (run_to_completion(sent) if call.uncancellable else sent)

    async def stream(
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """See `WorkerCalls.stream`."""
        with (
            self._track_answer(call, request) as answered,
            self._begin_span(call) as own,
            self._map_errors(),
        ):
            stream = getattr(self._stub, call.name)(
                request, timeout=self._seconds(call), metadata=(*self._metadata, *write_ids(own))
            )
            try:
                async for event in stream:
                    answered.set()
                    yield event
            finally:
                stream.cancel()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Close the connection, and cancel its calls after `grace_seconds`; the worker runs on."""
        await self._channel.close(grace_seconds)

    async def _send(self, call: Call[RequestT, ResponseT], request: RequestT) -> ResponseT:
        with self._begin_span(call) as own, self._map_errors():
            response: ResponseT = await getattr(self._stub, call.name)(
                request, timeout=self._seconds(call), metadata=(*self._metadata, *write_ids(own))
            )
        return response

    @contextmanager
    def _begin_span(self, call: Call[Any, Any]) -> Iterator[Span]:
        """Provide the span of a call. It is not the current one: a stream yields to its reader."""
        own = current_span().child(f"{calls.SERVICE}/{call.name}", "client")
        own.set({"rpc.system.name": "grpc", "server.address": self.address})
        error = ""
        try:
            yield own
        except GeneratorExit:  # the reader has seen enough
            raise
        except BaseException as raised:
            error = get_error_code(raised)
            raise
        finally:
            own.end(error)

    def _seconds(self, call: Call[Any, Any]) -> float:
        seconds: float = getattr(self._settings, call.timeout)
        return seconds

    @contextmanager
    def _track_answer(
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> Iterator[asyncio.Event]:
        """Provide an event to set at the call's first answer; it is set at the end in any case."""
        answered = asyncio.Event()
        session = "" if call.session is None else call.session(request)
        key = (call.name, session)
        self._unanswered.setdefault(key, set()).add(answered)
        try:
            yield answered
        finally:
            answered.set()
            self._unanswered[key].discard(answered)
            if not self._unanswered[key]:
                del self._unanswered[key]

    async def _wait_answered(self, name: str, session: str) -> None:
        """Wait for the first answer of calls. Raises WorkerLost after `quick_seconds`."""
        try:
            async with asyncio.timeout(self._settings.quick_seconds):
                for answered in tuple(self._unanswered.get((name, session), ())):
                    await answered.wait()
        except TimeoutError as error:
            raise WorkerLost(
                f"the worker {self.address} did not accept the {name} call of session {session!r} "
                f"within {self._settings.quick_seconds:g} seconds"
            ) from error

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Map the call's status to an error of the services."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from error
        except grpc.aio.UsageError as error:
            raise WorkerLost(f"the connection to the worker {self.address} is closed") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise WorkerLost(
                    f"the connection to the worker {self.address} was closed"
                ) from error
            raise

    def _to_error(self, error: grpc.aio.AioRpcError) -> WorkerRefused | WorkerLost:
        code = (error.trailing_metadata() or {}).get(REFUSAL_CODE)
        details = error.details() or ""
        if code is not None:
            return WorkerRefused(ErrorCode.parse(str(code)), details)
        worker = f"the worker {self.address}"
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNIMPLEMENTED as status:
                # A message over the limit, or a call of another release: the worker is there.
                return WorkerRefused(
                    ErrorCode.WORKER_ERROR,
                    f"{worker} cannot answer this call: {status.name.lower()}: {details}",
                )
            case grpc.StatusCode.INTERNAL:  # of the connection: a worker's own errors have a code
                return WorkerLost(f"{worker} failed: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return WorkerLost(f"{worker} did not answer in time: {details}")
            case grpc.StatusCode.CANCELLED:
                return WorkerLost(f"{worker} cancelled the call")
            case grpc.StatusCode.UNAVAILABLE:
                return WorkerLost(f"{worker} cannot be reached: {details}")
            case grpc.StatusCode.UNAUTHENTICATED:
                return WorkerLost(f"{worker} does not accept this gateway: {details}")
            case status:
                return WorkerLost(f"{worker} answered {status.name.lower()}: {details}")


def _build_metadata(settings: WireSettings) -> tuple[tuple[str, str], ...]:
    """Build the metadata of every call: the token, if there is one."""
    if settings.token is None:
        return ()
    return ((TOKEN_KEY, settings.token.get_secret_value()),)


def _open_channel(settings: WireSettings) -> grpc.aio.Channel:
    options = [
        ("grpc.enable_http_proxy", 0),  # workers are on the same network
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECTION_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", int(settings.reconnect_seconds * 1000)),
        ("grpc.max_metadata_size", 1 << 16),
    ]
    credentials = read_channel(settings)
    if credentials is None:
        return grpc.aio.insecure_channel(settings.address, options=options)
    return grpc.aio.secure_channel(settings.address, credentials, options=options)
