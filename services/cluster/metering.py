"""A worker with metered jobs: the computed tokens of each are published on every end of it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar, cast

import structlog

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.events import EventBus, TokensComputed
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.worker_client import Worker

_T = TypeVar("_T")
_log = structlog.get_logger("kvrecall.metering")


class MeteredWorker:
    """`Worker` that publishes TokensComputed after each job of another one that may compute.

    That is on every end: commit, cancellation, refusal, failure. The worker counts by session, so
    what it computed for a job that was cancelled is complete once the step that ran meanwhile is
    over, and what could not be asked for is in the session's next count. Events are published in the
    context of the job's caller. All other calls are the worker's own.
    """

    def __init__(self, worker: Worker, events: EventBus) -> None:
        self._worker = worker
        self._events = events
        self._taking: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    async def turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        """See `Worker.turn`."""
        try:
            async with aclosing(self._worker.turn(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._take(request.session)

    async def repair(self, request: pb.RepairRequest) -> pb.RepairResult:
        """See `Worker.repair`."""
        return await self._meter(request.session, self._worker.repair(request))

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResult:
        """See `Worker.settle`."""
        return await self._meter(request.session, self._worker.settle(request))

    async def prefill_ahead(self, request: pb.PrefillAheadRequest) -> pb.PrefillAheadResult:
        """See `Worker.prefill_ahead`."""
        return await self._meter(request.session, self._worker.prefill_ahead(request))

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """See `Worker.rebuild`."""
        return await self._meter(request.spec.session, self._worker.rebuild(request))

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """See `Worker.fork`."""
        return await self._meter(request.spec.session, self._worker.fork(request))

    async def build_episodes(self, request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        """See `Worker.build_episodes`."""
        return await self._meter(request.session, self._worker.build_episodes(request))

    async def wait_until_taken(self) -> None:
        """Wait until all that ended jobs computed is published, as far as it can be."""
        if self._taking:
            await asyncio.wait(self._taking)

    async def close(self) -> None:
        """Publish what ended jobs computed, then close the worker."""
        await self.wait_until_taken()
        await self._worker.close()

    async def _meter(self, session: str, job: Awaitable[_T]) -> _T:
        try:
            return await job
        finally:
            self._take(session)

    def _take(self, session: str) -> None:
        task = asyncio.create_task(self._publish(session), name="take usage")
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _publish(self, session: str) -> None:
        try:
            usage = await self._worker.take_usage(pb.TakeUsageRequest(session=session))
        except ServiceError as error:
            _log.debug("usage not taken", session=session, reason=error.message)
            return
        computed = TokensComputed(
            session,
            usage.prefilled_tokens,
            usage.decoded_tokens,
            usage.repaired_tokens,
            usage.settled_tokens,
        )
        if computed.total:
            self._events.publish(computed)


def meter(worker: Worker, events: EventBus) -> Worker:
    """Return a worker whose jobs are metered."""
    return cast("Worker", MeteredWorker(worker, events))
