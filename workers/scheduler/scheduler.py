"""A worker's requests, queued as jobs."""

import math
from collections import Counter
from concurrent.futures import Future
from typing import Any

from kvrecall.domain.fairness.share import Share
from kvrecall.domain.page_ids import PageId
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.page_naming import read_ids
from workers.episodes.build import run_build
from workers.errors import MalformedMessage
from workers.generation.steps import Steps
from workers.repair.repair import run_pause_repair
from workers.scheduler.job import Job, JobKind, JobState, ModelWork, SlotWork, StoreWork
from workers.scheduler.job_loop import JobLoop
from workers.tasks.ahead import run_ahead
from workers.tasks.open import run_fork, run_open, run_rebuild
from workers.tasks.sensitivity import awaits_sensitivity, run_measurement
from workers.tasks.settle import run_settle
from workers.tasks.turn import Emit, run_turn

# Between turns nobody waits for it.
_IN_BACKGROUND = Share(background=True)


class Scheduler:
    """Queues requests as jobs of a `JobLoop`. The methods may be called from any thread.

    Exceptions of the futures are `workers.errors`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = JobLoop(engine)
        self._measurement: Future[None] | None = None

    def turn(self, request: pb.TurnRequest, emit: Emit) -> "Future[pb.TurnDone]":
        """Queue a turn; `emit` gets its token and tool-call events on the scheduler's thread.

        Cancelling the future cancels the turn.
        """

        def turn(resident: ResidentSession) -> Steps[pb.TurnDone]:
            return run_turn(self.engine, resident, request, emit)

        share = Share(flow=request.flow, background=request.background)
        job = Job("turn", request.session, request.epoch, SlotWork(turn), share=share)
        return self._loop.submit(job)

    def repair(self, request: pb.RepairRequest) -> "Future[pb.RepairResult]":
        """Queue a repair between turns."""

        def repair(resident: ResidentSession) -> Steps[pb.RepairResult]:
            return run_pause_repair(self.engine, resident, request, lambda: job.stop_requested)

        work = SlotWork(repair)
        job = Job("repair", request.session, request.epoch, work, share=_IN_BACKGROUND)
        return self._loop.submit(job)

    def settle(self, request: pb.SettleRequest) -> "Future[pb.SettleResult]":
        """Queue the settling of a session between turns."""

        def settle(resident: ResidentSession) -> Steps[pb.SettleResult]:
            return run_settle(self.engine, resident)

        work = SlotWork(settle)
        job = Job("settle", request.session, request.epoch, work, share=_IN_BACKGROUND)
        return self._loop.submit(job)

    def prefill_ahead(self, request: pb.PrefillAheadRequest) -> "Future[pb.PrefillAheadResult]":
        """Queue the prefill of a session's next prompt; `stop_early` ends it behind a block."""

        def prefill(resident: ResidentSession) -> Steps[pb.PrefillAheadResult]:
            return run_ahead(self.engine, resident, request, lambda: job.stop_requested)

        work = SlotWork(prefill)
        job = Job("ahead", request.session, request.epoch, work, share=_IN_BACKGROUND)
        return self._loop.submit(job)

    def take_usage(self, name: str) -> "Future[pb.Usage]":
        """Take what was computed for a session, between two steps: a cancelled job computes no more."""
        return self._loop.call(lambda: self.engine.usage.take(name))

    def stop_early(self, name: str) -> "Future[None]":
        """Stop the session's background work early, for a turn: a repair promotes the best rows so far."""
        return self._loop.call(lambda: self._loop.request_stop(name))

    def build_episodes(self, request: pb.BuildEpisodesRequest) -> "Future[pb.BuildEpisodesResult]":
        """Queue a build of episodes; cancelling it leaves the session as it is."""

        def build(resident: ResidentSession) -> Steps[pb.BuildEpisodesResult]:
            return run_build(self.engine, resident, request)

        work = SlotWork(build)
        job = Job(
            "build", request.session, request.epoch, work, read_only=True, share=_IN_BACKGROUND
        )
        return self._loop.submit(job)

    def prepare(self, spec: pb.SessionSpec, state: pb.SessionState) -> "Future[None] | None":
        """Measure what the worker has to know of its model before it opens such a session.

        None if it knows all. There is one measurement for all sessions; between its forward passes
        other jobs go on.
        """
        if not awaits_sensitivity(self.engine, spec, state):
            return None

        def measure() -> "Future[None]":
            if self._measurement is None or self._measurement.done():
                work = ModelWork(lambda: run_measurement(self.engine))
                job = Job("measure", "", 0, work, read_only=True)
                self._measurement = self._loop.submit(job)
            return self._measurement

        return self._loop.call_and_wait(measure)

    def open(self, request: pb.OpenRequest) -> "Future[pb.MemoryReport]":
        """Open a session as the request states; running jobs of it are cancelled first."""

        def restore(session: WorkerSession) -> Steps[pb.MemoryReport]:
            return run_open(self.engine, session, request)

        return self._submit_open(request.spec, request.state, StoreWork(restore))

    def fork(self, request: pb.ForkRequest) -> "Future[pb.ForkResult]":
        """Fork a session at a turn whose state is not known, from the log up to it."""

        def replay(child: ResidentSession) -> Steps[pb.ForkResult]:
            return run_fork(self.engine, child, request)

        return self._submit_open(request.spec, pb.SessionState(), SlotWork(replay))

    def rebuild(self, request: pb.RebuildRequest) -> "Future[pb.RebuildResult]":
        """Compute a session's lost pages again, then open it."""

        def rebuild(resident: ResidentSession) -> Steps[pb.RebuildResult]:
            return run_rebuild(self.engine, resident, request)

        return self._submit_open(request.spec, request.state, SlotWork(rebuild))

    def release(self, request: pb.ReleaseRequest) -> "Future[None]":
        """Release a session that moved to another worker."""

        def release() -> "Future[None]":
            known = self.engine.sessions.get(request.session)
            if known is not None and known.config.epoch <= request.epoch:
                self._loop.forget(request.session)
            return self.engine.release(request.session, request.epoch)

        return self._loop.call_and_wait(release)

    def delete(self, request: pb.DeleteRequest) -> "Future[None]":
        """Close a session that was deleted, with its running jobs. Its pages stay (`delete_pages`)."""

        def delete() -> "Future[None]":
            self._loop.forget(request.session)
            return self.engine.unload(request.session)

        return self._loop.call_and_wait(delete)

    def delete_pages(self, request: pb.DeletePagesRequest) -> "Future[int]":
        """Delete pages that no session has any more; returns how many were here."""
        return self.engine.delete_pages(read_ids(request.page_ids))

    def list_pages(self, request: pb.ListPagesRequest) -> "Future[set[PageId]]":
        """List the pages that this worker alone stores. Raises MalformedMessage."""
        if not math.isfinite(request.older_than_seconds):
            raise MalformedMessage(
                f"older_than_seconds must be a number of seconds, got {request.older_than_seconds}"
            )
        return self.engine.store_io.submit(
            lambda: self.engine.stored.list_pages(request.older_than_seconds)
        )

    def memory(self, name: str) -> "Future[pb.MemoryReport]":
        """Report a session's rows and bytes."""
        return self._loop.call(lambda: self.engine.memory(self.engine.session(name)))

    def slots_in_use(self) -> int:
        """Count the slots of resident sessions."""
        return self.engine.cache.slots - self.engine.cache.free_slots()

    def queued(self) -> int:
        """Count the jobs that wait for a slot or for their session."""
        return self._loop.queued()

    def count_jobs(self) -> Counter[tuple[JobKind, JobState]]:
        """Count the jobs by kind and state."""
        return self._loop.count_jobs()

    def close(self) -> None:
        """Cancel all jobs, stop the thread, finish the writes. Idempotent."""
        self._loop.close()
        self.engine.close()

    def _submit_open(
        self,
        spec: pb.SessionSpec,
        state: pb.SessionState,
        work: SlotWork | StoreWork,
    ) -> "Future[Any]":
        """Queue a job that restores an empty session, in place of the session's other jobs."""

        def create_empty() -> None:
            # A refusal here must not cancel the session's jobs.
            self.engine.admit(spec, state)
            self._loop.cancel_jobs(spec.session)
            self.engine.create_empty(spec, state)

        share = Share(spec.tenant, spec.session, spec.weight or 1.0)
        job = Job("open", spec.session, spec.epoch, work, opens=True, share=share)
        return self._loop.submit(job, create_empty)
