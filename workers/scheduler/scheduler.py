"""A worker's requests, queued as jobs."""

from collections import Counter
from concurrent.futures import Future
from typing import Any

from kvrecall.domain.page_ids import PageId
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.parallel.decision import Decision
from workers.scheduler.calls import Calls
from workers.scheduler.job import JobKind, JobState
from workers.scheduler.job_loop import JobLoop
from workers.scheduler.requests import Request, build_job, build_measurement
from workers.tasks.sensitivity import awaits_sensitivity
from workers.tasks.turn import Emit


class Scheduler:
    """Queues requests as jobs of a `JobLoop`. The methods may be called from any thread.

    Exceptions of the futures are `workers.errors`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = JobLoop(engine)
        self._calls = Calls(engine, self._loop.runner)
        self._measurement: Future[None] | None = None

    def turn(self, request: pb.TurnRequest, emit: Emit) -> "Future[pb.TurnDone]":
        """Queue a turn; `emit` gets its token and tool-call events on the scheduler's thread.

        Cancelling the future cancels the turn.
        """
        return self._loop.submit(build_job(self.engine, request, emit))

    def repair(self, request: pb.RepairRequest) -> "Future[pb.RepairResult]":
        """Queue a repair between turns."""
        return self._submit(request)

    def settle(self, request: pb.SettleRequest) -> "Future[pb.SettleResult]":
        """Queue the settling of a session between turns."""
        return self._submit(request)

    def prefill_ahead(self, request: pb.PrefillAheadRequest) -> "Future[pb.PrefillAheadResult]":
        """Queue the prefill of a session's next prompt; `stop_early` ends it behind a block."""
        return self._submit(request)

    def take_usage(self, name: str) -> "Future[pb.Usage]":
        """Take what was computed for a session, between two steps: a cancelled job computes no more."""
        return self._loop.call(lambda: self.engine.usage.take(name))

    def stop_early(self, name: str) -> "Future[None]":
        """Stop the session's background work early, for a turn: a repair promotes the best rows so far."""
        decision = Decision("call", call=("stop_early", (name,)))
        return self._loop.call(lambda: self._calls.stop_early(name), decision)

    def build_episodes(self, request: pb.BuildEpisodesRequest) -> "Future[pb.BuildEpisodesResult]":
        """Queue a build of episodes; cancelling it leaves the session as it is."""
        return self._submit(request)

    def prepare(self, spec: pb.SessionSpec, state: pb.SessionState) -> "Future[None] | None":
        """Measure what the worker has to know of its model before it opens such a session.

        None if it knows all. There is one measurement for all sessions; between its forward passes
        other jobs go on.
        """
        if not awaits_sensitivity(self.engine, spec, state):
            return None

        def measure() -> "Future[None]":
            if self._measurement is None or self._measurement.done():
                self._measurement = self._loop.submit(build_measurement(self.engine))
            return self._measurement

        return self._loop.call_and_wait(measure)

    def open(self, request: pb.OpenRequest) -> "Future[pb.MemoryReport]":
        """Open a session as the request states; running jobs of it are cancelled first."""
        return self._submit(request)

    def fork(self, request: pb.ForkRequest) -> "Future[pb.ForkResult]":
        """Fork a session at a turn whose state is not known, from the log up to it."""
        return self._submit(request)

    def rebuild(self, request: pb.RebuildRequest) -> "Future[pb.RebuildResult]":
        """Compute a session's lost pages again, then open it."""
        return self._submit(request)

    def release(self, request: pb.ReleaseRequest) -> "Future[None]":
        """Release a session that moved to another worker."""
        name, epoch = request.session, request.epoch
        decision = Decision("call", call=("release", (name, epoch)))
        return self._loop.call_and_wait(lambda: self._calls.release(name, epoch), decision)

    def delete(self, request: pb.DeleteRequest) -> "Future[None]":
        """Close a session that was deleted, with its running jobs. Its pages stay (`delete_pages`)."""
        name = request.session
        decision = Decision("call", call=("delete", (name,)))
        return self._loop.call_and_wait(lambda: self._calls.delete(name), decision)

    def delete_pages(self, request: pb.DeletePagesRequest) -> "Future[int]":
        """Delete pages that no session has any more; returns how many were here. Raises MalformedMessage."""
        return self._submit(request)

    def list_pages(self, request: pb.ListPagesRequest) -> "Future[set[PageId]]":
        """List the pages that this worker alone stores. Raises MalformedMessage."""
        return self._submit(request)

    def memory(self, name: str) -> "Future[pb.MemoryReport]":
        """Report a session's rows and bytes."""
        decision = Decision("call", call=("memory", (name,)))
        return self._loop.call(lambda: self._calls.memory(name), decision)

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

    def _submit(self, request: Request) -> "Future[Any]":
        return self._loop.submit(build_job(self.engine, request))
