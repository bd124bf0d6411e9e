"""Every call that a worker answers, on its scheduler and its encoder, whoever carries the calls."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import TypeVar

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.store import RowStore
from workers import methods
from workers.errors import Cancelled
from workers.model.embedder import Embedder
from workers.scheduler.scheduler import Scheduler

_T = TypeVar("_T")


class WorkerService:
    """The calls of `service Worker` in worker.proto. Every one raises `workers.errors` for what is refused.

    Cancelling the task that waits for a call cancels the call. `close` ends scheduler, encoder and store.
    """

    def __init__(self, scheduler: Scheduler, embedder: Embedder, model: str) -> None:
        self._scheduler = scheduler
        self._embedder = embedder
        self._model = model

    def describe(self) -> wire.WorkerInfo:
        """Model, shape and limits."""
        engine = self._scheduler.engine
        shape = engine.model.shape
        settings = engine.settings
        return wire.WorkerInfo(
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
            page_tokens=engine.store.layout.page_tokens,
            token_bytes=engine.store.layout.token_bytes,
        )

    async def retain(self, request: wire.RetainRequest) -> None:
        """Drop stored rows that belong to no session of the request."""
        await _awaited(self._scheduler.retain(request))

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Make the session be what the request says."""
        return await _awaited(self._scheduler.open(request))

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session that begins as another one was."""
        return await _awaited(self._scheduler.fork(request))

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute lost pages again, and open the session."""
        return await _awaited(self._scheduler.rebuild(request))

    async def release(self, request: wire.ReleaseRequest) -> None:
        """Let a session go that goes on elsewhere."""
        await _awaited(self._scheduler.release(request))

    async def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        """Run a turn; closing the iterator cancels it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[wire.TurnEvent | None] = asyncio.Queue()
        done = self._scheduler.turn(request, lambda event: _post(loop, events, event))
        done.add_done_callback(lambda _: _post(loop, events, None))
        try:
            while (event := await events.get()) is not None:
                yield event
            finished = await _awaited(done)
            yield wire.TurnEvent(done=finished)
        finally:
            done.cancel()

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        """Run a repair between turns."""
        return await _awaited(self._scheduler.repair(request))

    async def hurry(self, request: wire.HurryRequest) -> None:
        """End the session's repairs with what they have found so far."""
        await _awaited(self._scheduler.hurry(request.session))

    def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        """The text of each chunk of tokens."""
        tokenizer = self._scheduler.engine.tokenizer
        return wire.DetokenizeResult(
            texts=[tokenizer.decode(chunk.ids) for chunk in request.chunks]
        )

    async def embed(self, request: wire.EmbedRequest) -> wire.EmbedResult:
        """A unit vector per text."""
        vectors = await _awaited(self._embedder.embed(request.texts))
        return wire.EmbedResult(
            dimensions=vectors.shape[1], vectors=vectors.astype("<f4").tobytes()
        )

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        """Choose the rows of each planned episode."""
        return await _awaited(self._scheduler.build_episodes(request))

    async def memory(self, request: wire.MemoryRequest) -> wire.MemoryReport:
        """What the session holds."""
        return await _awaited(self._scheduler.memory(request.session))

    async def drop(self, request: wire.DropRequest) -> None:
        """Forget the session."""
        await _awaited(self._scheduler.drop(request))

    def stats(self) -> wire.WorkerStats:
        """Counters for the metrics page."""
        engine = self._scheduler.engine
        return wire.WorkerStats(
            slots_in_use=self._scheduler.slots_in_use(),
            sessions=len(engine.sessions),
            queued=self._scheduler.queued(),
            tiers=_tiers(engine.store),
            lost_pages=engine.lost_pages,
            rebuilt_pages=engine.rebuilt_pages,
        )

    def record(self, name: str, address: str, *, draining: bool) -> wire.WorkerRecord:
        """How the worker announces itself, with what it has to do now."""
        engine = self._scheduler.engine
        return wire.WorkerRecord(
            name=name,
            address=address,
            model=self._model,
            fingerprint=engine.model.fingerprint,
            slots=engine.settings.slots,
            free_slots=engine.settings.slots - self._scheduler.slots_in_use(),
            queued=self._scheduler.queued(),
            sessions=len(engine.sessions),
            draining=draining,
        )

    async def close(self) -> None:
        """Stop the scheduler and the encoder, then the store."""
        await asyncio.to_thread(self._scheduler.close)
        await asyncio.to_thread(self._embedder.close)
        await asyncio.to_thread(self._scheduler.engine.store.close)


def _tiers(store: RowStore) -> dict[str, wire.TierStats]:
    used = store.usage()
    limits = store.limits()
    return {
        name: wire.TierStats(
            bytes=used[name],
            limit_bytes=limits[name] or 0,
            hits=counted.hits,
            misses=counted.misses,
            errors=counted.errors,
            refused_pages=counted.refused_pages,
            read_bytes=counted.read_bytes,
            written_bytes=counted.written_bytes,
            reads=counted.reads,
            writes=counted.writes,
            read_seconds=counted.read_seconds,
            write_seconds=counted.write_seconds,
        )
        for name, counted in store.counters().items()
    }


def _post(
    loop: asyncio.AbstractEventLoop,
    events: "asyncio.Queue[wire.TurnEvent | None]",
    event: wire.TurnEvent | None,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)


async def _awaited(result: "Future[_T]") -> _T:
    """Await an answer of another thread. Raises Cancelled when that thread has given it up, not the caller."""
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if result.cancelled() and task is not None and not task.cancelling():
            raise Cancelled("the worker is closing") from error
        raise
