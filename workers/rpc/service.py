"""The worker's answers to all calls of the table, over any transport."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import TypeVar

import structlog
from google.protobuf.empty_pb2 import Empty

from kvrecall.domain.page_ids import join_ids
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.calls import Call, RequestT, ResponseT
from kvrecall.protocol.convert import sampling_defaults_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.sandbox.tenant_queue import QueueFull
from kvstore.errors import KvStoreError
from workers import methods
from workers.engine.row_map import map_rows
from workers.engine.stored.stored_sessions import StoredSessions
from workers.errors import Cancelled, Overloaded, StorageFailed
from workers.model.embedder import Embedder
from workers.model.layers.report import describe_layers
from workers.model.loader import LoadedModel
from workers.model.template_variables import find_template_variables
from workers.model.tokenize import tokenize
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.metrics import ScrapedMetrics
from workers.scheduler.scheduler import Scheduler

_T = TypeVar("_T")
_PAGES_LISTED = 50_000
_log = structlog.get_logger(__name__)


class WorkerService:
    """Answers every call of `kvrecall.protocol.calls` with its scheduler and its encoder.

    A refused request raises an error of `workers.errors`. Cancelling the task that waits for a call
    cancels the call. `close` ends scheduler, encoder and store. `metrics` are the worker's.
    """

    def __init__(
        self, scheduler: Scheduler, embedder: Embedder, model: str, catalog: CatalogBinding
    ) -> None:
        self._scheduler = scheduler
        self._catalog = catalog
        self._embedder = embedder
        self._model = model
        self.metrics = scheduler.engine.metrics
        self.metrics.refresh_with(ScrapedMetrics(scheduler, model).refresh)

    def handler(
        self, call: Call[RequestT, ResponseT]
    ) -> Callable[[RequestT], Awaitable[ResponseT]]:
        """The method of this class that answers `call`."""
        handler: Callable[[RequestT], Awaitable[ResponseT]] = getattr(self, call.method)
        return handler

    def stream_handler(
        self, call: Call[RequestT, ResponseT]
    ) -> Callable[[RequestT], AsyncGenerator[ResponseT, None]]:
        """The method of this class that answers the streaming `call`."""
        handler: Callable[[RequestT], AsyncGenerator[ResponseT, None]] = getattr(self, call.method)
        return handler

    async def describe(self, request: pb.DescribeRequest) -> pb.WorkerInfo:
        """Model, shape and limits, for a gateway of the catalog that the pages belong to."""
        await self._require_catalog(request.catalog)
        engine = self._scheduler.engine
        shape = engine.model.whole_shape
        settings = engine.settings
        return pb.WorkerInfo(
            model=self._model,
            fingerprint=engine.model.fingerprint,
            layers=shape.n_layers,
            kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            slots=settings.slots,
            max_budget=settings.max_budget,
            min_budget=settings.min_budget,
            block_tokens=settings.block_tokens,
            max_context=engine.model.max_context,
            methods=[methods.describe(name) for name in methods.METHODS],
            repair=methods.describe_repair(),
            prefill=methods.describe_prefill(),
            retrieve=methods.describe_retrieval(),
            page_tokens=engine.store.layout.page_tokens,
            token_bytes=engine.store.layout.token_bytes * engine.group.count,
            protocol_version=PROTOCOL_VERSION,
            sampling=sampling_defaults_to_wire(engine.model.sampling),
            call_format=engine.tokenizer.format.name if engine.tokenizer.format.mark else "",
            layer_kinds=_describe_layers(engine.model),
            rewrites=engine.tokenizer.rewrites,
            max_session_tokens=engine.long_sessions.most_tokens,
            template_variables=find_template_variables(engine.tokenizer.inner),
        )

    async def list_pages(self, request: pb.ListPagesRequest) -> AsyncGenerator[pb.PageList, None]:
        """The pages that this worker alone stores, in parts."""
        await self._require_catalog(request.catalog)
        pages = await _wait(self._scheduler.list_pages(request))
        rest = iter(pages)
        while part := list(islice(rest, _PAGES_LISTED)):
            yield pb.PageList(page_ids=join_ids(part))

    async def delete_pages(self, request: pb.DeletePagesRequest) -> pb.DeletePagesResult:
        """Delete pages that no session has any more."""
        await self._require_catalog(request.catalog)
        deleted = await _wait(self._scheduler.delete_pages(request))
        return pb.DeletePagesResult(deleted=deleted)

    async def open(self, request: pb.OpenRequest) -> pb.MemoryReport:
        """Open the session as the request states."""
        await self._prepare(request.spec, request.state)
        return await _wait(self._scheduler.open(request))

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """Fork a session at a turn whose state is not known."""
        await self._prepare(request.spec, pb.SessionState())
        return await _wait(self._scheduler.fork(request))

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """Compute lost pages again, and open the session."""
        await self._prepare(request.spec, request.state)
        return await _wait(self._scheduler.rebuild(request))

    async def release(self, request: pb.ReleaseRequest) -> Empty:
        """Release a session that moved to another worker."""
        await _wait(self._scheduler.release(request))
        return Empty()

    async def turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        """Run a turn; closing the iterator cancels it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[pb.TurnEvent | None] = asyncio.Queue()
        done = self._scheduler.turn(request, lambda event: _post(loop, events, event))
        done.add_done_callback(lambda _: _post(loop, events, None))
        try:
            while (event := await events.get()) is not None:
                yield event
            finished = await _wait(done)
            yield pb.TurnEvent(done=finished)
        finally:
            done.cancel()

    async def repair(self, request: pb.RepairRequest) -> AsyncGenerator[pb.RepairEvent, None]:
        """Run a repair between turns; closing the iterator cancels it."""
        result = self._scheduler.repair(request)
        try:
            yield pb.RepairEvent(accepted=True)
            finished = await _wait(result)
            yield pb.RepairEvent(result=finished)
        finally:
            result.cancel()

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResult:
        """Settle a session between turns."""
        return await _wait(self._scheduler.settle(request))

    async def prefill_ahead(self, request: pb.PrefillAheadRequest) -> pb.PrefillAheadResult:
        """Compute a session's next prompt as far as it is known."""
        return await _wait(self._scheduler.prefill_ahead(request))

    async def take_usage(self, request: pb.TakeUsageRequest) -> pb.Usage:
        """The tokens computed for the session since this was last asked."""
        return await _wait(self._scheduler.take_usage(request.session))

    async def stop_early(self, request: pb.StopEarlyRequest) -> Empty:
        """Stop the session's background work early; a repair promotes the best rows so far."""
        await _wait(self._scheduler.stop_early(request.session))
        return Empty()

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResult:
        """The text of each chunk of tokens."""
        tokenizer = self._scheduler.engine.tokenizer
        return pb.DetokenizeResult(texts=[tokenizer.decode(chunk.ids) for chunk in request.chunks])

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResult:
        """The tokens of a new session's prompt, or those of a text.

        Rendered off the event loop.
        """
        engine = self._scheduler.engine
        return await self._run(partial(tokenize, engine.tokenizer, request))

    async def map_rows(self, request: pb.MapRowsRequest) -> pb.MapRowsResult:
        """The active rows of a committed state, off the event loop and the scheduler."""
        engine = self._scheduler.engine
        shape, settings = engine.model.whole_shape, engine.settings
        return await self._run(partial(map_rows, request, shape, settings))

    async def embed(self, request: pb.EmbedRequest) -> pb.EmbedResult:
        """A unit vector per text."""
        vectors = await _wait(self._embedder.embed(request.texts))
        return pb.EmbedResult(dimensions=vectors.shape[1], vectors=vectors.astype("<f4").tobytes())

    async def build_episodes(self, request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        """Select the rows of each planned episode."""
        return await _wait(self._scheduler.build_episodes(request))

    async def memory(self, request: pb.MemoryRequest) -> pb.MemoryReport:
        """Rows and bytes of the session."""
        return await _wait(self._scheduler.memory(request.session))

    async def delete(self, request: pb.DeleteRequest) -> Empty:
        """Delete the session."""
        await _wait(self._scheduler.delete(request))
        return Empty()

    async def stats(self, request: Empty) -> pb.WorkerStats:
        """Load and counters, for the list of workers."""
        engine = self._scheduler.engine
        return pb.WorkerStats(
            slots_in_use=self._scheduler.slots_in_use(),
            sessions=len(engine.sessions),
            queued=self._scheduler.queued(),
            tiers=_tier_stats(engine.stored),
            lost_pages=engine.lost_pages,
            rebuilt_pages=engine.rebuilt_pages,
            prefilled_tokens=engine.prefilled_tokens,
        )

    def record(self, name: str, address: str, *, draining: bool) -> pb.WorkerRecord:
        """Build the worker's record for the registry, with its current load."""
        engine = self._scheduler.engine
        return pb.WorkerRecord(
            name=name,
            address=address,
            model=self._model,
            fingerprint=engine.model.fingerprint,
            slots=engine.settings.slots,
            free_slots=engine.settings.slots - self._scheduler.slots_in_use(),
            queued=self._scheduler.queued(),
            sessions=len(engine.sessions),
            draining=draining,
            protocol_version=PROTOCOL_VERSION,
        )

    async def _prepare(self, spec: pb.SessionSpec, state: pb.SessionState) -> None:
        """Wait until the worker can open such a session.

        Raises Overloaded after `measure_seconds`; the measurement goes on, for the next attempt.
        """
        measured = self._scheduler.prepare(spec, state)
        if measured is None:
            return
        try:
            async with asyncio.timeout(self._scheduler.engine.settings.measure_seconds):
                await _wait(measured)
        except TimeoutError as error:
            raise Overloaded(
                "the sensitivity of the model's layers is being measured, once for this model, and "
                "the session's budget is split by it; try again in a minute, or ask for uniform "
                "layer_budgets"
            ) from error

    async def _run(self, work: Callable[[], _T]) -> _T:
        """Run work on a renderer's thread. Raises its errors, and Overloaded."""
        try:
            return await _wait(self._scheduler.engine.renderer.submit("", work))
        except QueueFull as error:
            raise Overloaded("too many texts wait to be encoded; try again later") from error

    async def _require_catalog(self, catalog: str) -> None:
        """Raise CatalogMismatch, or StorageFailed when the pages cannot be bound to a catalog."""
        try:
            await asyncio.to_thread(self._catalog.require, catalog)
        except OSError as error:
            raise StorageFailed(f"the catalog's id cannot be written: {error}") from error

    async def close(self) -> None:
        """Stop the scheduler and the encoder, then the store.

        Rows that no durable tier accepts are logged: their turns were answered as not durable.
        """
        await asyncio.to_thread(self._scheduler.close)
        await asyncio.to_thread(self._embedder.close)
        try:
            await asyncio.to_thread(self._scheduler.engine.stored.close)
        except KvStoreError as error:
            _log.error("rows not stored", reason=str(error), effect="computed again at their use")


def _describe_layers(model: LoadedModel) -> list[pb.LayerKind]:
    kinds = describe_layers(model.plan, model.shape, model.side, model.dtype)
    return [pb.LayerKind(**asdict(kind)) for kind in kinds]


def _tier_stats(store: StoredSessions) -> dict[str, pb.TierStats]:
    return {
        name: pb.TierStats(
            bytes=tier.used_bytes,
            limit_bytes=tier.limit_bytes or 0,
            hits=tier.counters.hits,
            misses=tier.counters.misses,
            errors=tier.counters.errors,
            refused_pages=tier.counters.refused_pages,
            read_bytes=tier.counters.read_bytes,
            written_bytes=tier.counters.written_bytes,
            reads=tier.counters.reads,
            writes=tier.counters.writes,
            read_seconds=tier.counters.read_seconds,
            write_seconds=tier.counters.write_seconds,
            failure=tier.failure or "",
        )
        for name, tier in store.tiers().items()
    }


def _post(
    loop: asyncio.AbstractEventLoop,
    events: "asyncio.Queue[pb.TurnEvent | None]",
    event: pb.TurnEvent | None,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)


async def _wait(result: "Future[_T]") -> _T:
    """Wait for another thread's result. Raises Cancelled if that thread cancelled it."""
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if result.cancelled() and task is not None and not task.cancelling():
            raise Cancelled("the worker is closing") from error
        raise
