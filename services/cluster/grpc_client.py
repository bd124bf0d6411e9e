"""A worker that is a process of its own, reached over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.cancellation import run_to_completion
from services.cluster.settings import WireSettings

_FIRST_RECONNECT_MS = 100
_CONNECTION_ATTEMPT_MS = 5000


class GrpcWorker:
    """`services.cluster.worker_client.Worker` at an address. A lost connection is made again by the next call.

    Raises OSError when a certificate cannot be read. To be made in a running event loop.
    """

    def __init__(self, settings: WireSettings) -> None:
        self._settings = settings
        self.address = settings.worker
        self._channel = _channel(settings)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._repairs: dict[str, set[asyncio.Event]] = {}

    async def describe(self) -> wire.WorkerInfo:
        """Model, shape and limits; waits for a worker that is still starting."""
        with self._told():
            info: wire.WorkerInfo = await self._stub.Describe(
                Empty(), timeout=self._settings.connect_seconds, wait_for_ready=True
            )
        return info

    def place(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        """There is no choice. Raises WorkerLost when it is to be avoided."""
        if self.address in avoid:
            raise WorkerLost(f"there is no worker but {self.address}")
        return self.address

    async def workers(self) -> list[wire.WorkerRecord]:
        """This one."""
        return [await self.record(self.address, await self.describe())]

    async def record(self, name: str, info: wire.WorkerInfo) -> wire.WorkerRecord:
        """What the worker has to do now, and whether it drains, if it answers within `look_seconds`."""
        seconds = self._settings.look_seconds
        stats: wire.WorkerStats = await self._ask(self._stub.Stats, Empty(), seconds)
        health = await self._ask(self._health.Check, health_pb2.HealthCheckRequest(), seconds)
        draining = health.status != health_pb2.HealthCheckResponse.SERVING
        return wire.WorkerRecord(
            name=name,
            address=self.address,
            model=info.model,
            fingerprint=info.fingerprint,
            slots=info.slots,
            free_slots=info.slots - stats.slots_in_use,
            queued=stats.queued,
            sessions=stats.sessions,
            draining=draining,
        )

    async def retain(self, request: wire.RetainRequest) -> None:
        """Drop stored rows that belong to no session of these."""
        await self._ask(self._stub.Retain, request, self._settings.open_seconds)

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Make the session be what the request says.

        It is waited for even when the caller is cancelled: on its way it could come after the session's next turn.
        """
        report: wire.MemoryReport = await run_to_completion(
            self._ask(self._stub.Open, request, self._settings.open_seconds)
        )
        return report

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session that begins as another one was; waited for as `open` is."""
        result: wire.ForkResult = await run_to_completion(
            self._ask(self._stub.Fork, request, self._settings.rebuild_seconds)
        )
        return result

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute a session's lost pages again."""
        result: wire.RebuildResult = await self._ask(
            self._stub.Rebuild, request, self._settings.rebuild_seconds
        )
        return result

    async def release(self, request: wire.ReleaseRequest) -> None:
        """Let a session go that goes on elsewhere."""
        await self._ask(self._stub.Release, request, self._settings.open_seconds)

    async def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        """Run a turn; closing the iterator cancels it."""
        with self._told():
            call = self._stub.Turn(request, timeout=self._settings.turn_seconds)
            try:
                async for event in call:
                    yield event
            finally:
                call.cancel()

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        """Run a repair between turns; cancelling the call cancels it."""
        taken = asyncio.Event()
        self._repairs.setdefault(request.session, set()).add(taken)
        try:
            with self._told():
                return await self._repair(request, taken)
        finally:
            taken.set()
            self._repairs[request.session].discard(taken)
            if not self._repairs[request.session]:
                del self._repairs[request.session]

    async def _repair(self, request: wire.RepairRequest, taken: asyncio.Event) -> wire.RepairResult:
        call = self._stub.Repair(request, timeout=self._settings.repair_seconds)
        try:
            async for event in call:
                taken.set()
                if event.WhichOneof("event") == "result":
                    result: wire.RepairResult = event.result
                    return result
        finally:
            call.cancel()
        raise WorkerLost(f"the worker {self.address} ended the repair without a result")

    async def hurry(self, request: wire.HurryRequest) -> None:
        """End the session's repairs with what they have found so far.

        Calls overtake each other on their way, and a hurry that came first would find nothing: it waits until the
        worker says that it has the repair.
        """
        try:
            async with asyncio.timeout(self._settings.quick_seconds):
                for taken in tuple(self._repairs.get(request.session, ())):
                    await taken.wait()
        except TimeoutError as error:
            raise WorkerLost(
                f"the worker {self.address} did not take the repair that is to be hurried"
            ) from error
        await self._ask(self._stub.Hurry, request, self._settings.quick_seconds)

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        """The text of each chunk of tokens."""
        result: wire.DetokenizeResult = await self._ask(
            self._stub.Detokenize, request, self._settings.quick_seconds
        )
        return result

    async def embed(self, texts: list[str]) -> wire.EmbedResult:
        """A unit vector per text."""
        request = wire.EmbedRequest(texts=texts)
        result: wire.EmbedResult = await self._ask(
            self._stub.Embed, request, self._settings.embed_seconds
        )
        return result

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        """Choose the rows of each planned episode; cancelling the call cancels it."""
        result: wire.BuildEpisodesResult = await self._ask(
            self._stub.BuildEpisodes, request, self._settings.build_seconds
        )
        return result

    async def memory(self, session: str) -> wire.MemoryReport:
        """What the session holds."""
        request = wire.MemoryRequest(session=session)
        report: wire.MemoryReport = await self._ask(
            self._stub.Memory, request, self._settings.quick_seconds
        )
        return report

    async def drop(self, request: wire.DropRequest) -> None:
        """Forget the session."""
        await self._ask(self._stub.Drop, request, self._settings.open_seconds)

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """Counters for the metrics page."""
        stats: wire.WorkerStats = await self._ask(
            self._stub.Stats, Empty(), self._settings.look_seconds
        )
        return {self.address: stats}

    async def close(self, grace_seconds: float = 0.0) -> None:
        """End the connection, and what still runs on it after `grace_seconds`; the worker itself goes on."""
        await self._channel.close(grace_seconds)

    async def _ask(self, call: Any, request: Any, seconds: float) -> Any:
        with self._told():
            return await call(request, timeout=seconds)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """The call's status as an error of the services."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except grpc.aio.UsageError as error:
            raise WorkerLost(f"the connection to the worker {self.address} is closed") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise WorkerLost(
                    f"the connection to the worker {self.address} was closed"
                ) from error
            raise

    def _error(self, error: grpc.aio.AioRpcError) -> WorkerRefused | WorkerLost:
        code = (error.trailing_metadata() or {}).get(REFUSAL_CODE)
        details = error.details() or ""
        if code is not None:
            return WorkerRefused(ErrorCode.parse(str(code)), details)
        worker = f"the worker {self.address}"
        match error.code():
            case grpc.StatusCode.INTERNAL:
                return WorkerLost(f"{worker} failed: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return WorkerLost(f"{worker} did not answer in time: {details}")
            case grpc.StatusCode.CANCELLED:
                return WorkerLost(f"{worker} cancelled the call")
            case grpc.StatusCode.UNAVAILABLE:
                return WorkerLost(f"{worker} cannot be reached: {details}")
            case status:
                return WorkerLost(f"{worker} answered {status.name.lower()}: {details}")


def _channel(settings: WireSettings) -> grpc.aio.Channel:
    options = [
        ("grpc.enable_http_proxy", 0),  # workers are neighbours
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
    if settings.tls_ca is None:
        return grpc.aio.insecure_channel(settings.worker, options=options)
    key = None if settings.tls_key is None else settings.tls_key.read_bytes()
    chain = None if settings.tls_cert is None else settings.tls_cert.read_bytes()
    credentials = grpc.ssl_channel_credentials(settings.tls_ca.read_bytes(), key, chain)
    return grpc.aio.secure_channel(settings.worker, credentials, options=options)
