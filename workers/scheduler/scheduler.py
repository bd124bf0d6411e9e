"""Many sessions on one device: slots, and one decoding batch for all sessions that decode."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
import torch

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.store_io import shared_pages
from workers.episodes.build import run_build
from workers.errors import Cancelled, Overloaded, WorkerError
from workers.generation.steps import NextLogits, Steps
from workers.repair.repair import run_pause_repair
from workers.scheduler.job import Job, SlotWork, StoreWork, resolve
from workers.tasks.open import run_fork_from_state, run_fork_replaying, run_open, run_rebuild
from workers.tasks.turn import Emit, run_turn

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class Scheduler:
    """Runs jobs on one thread of its own. The public methods may be called from any thread.

    A session's jobs run one after the other, in the order of their submission. A job starts when
    its session has a slot; a session without a running job is swapped out when another needs its
    slot, the longest idle one first. Exceptions of the futures are `workers.errors`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: list[Job] = []
        self._active: list[Job] = []
        self._last_used: dict[str, float] = {}
        self._closing = False
        self._gate = threading.Lock()  # nothing enters the inbox once closing is set
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def turn(self, request: wire.TurnRequest, emit: Emit) -> "Future[wire.TurnDone]":
        """Queue a turn; `emit` gets its token and tool-call events on the scheduler's thread.

        Cancelling the future cancels the turn.
        """

        def turn(resident: ResidentSession) -> Steps[wire.TurnDone]:
            return run_turn(self.engine, resident, request, emit)

        self.engine.store.prefetch(request.session)
        return self._submit(Job(request.session, request.epoch, SlotWork(turn)))

    def repair(self, request: wire.RepairRequest) -> "Future[wire.RepairResult]":
        """Queue a repair between turns."""

        def repair(resident: ResidentSession) -> Steps[wire.RepairResult]:
            return run_pause_repair(self.engine, resident, request, lambda: job.stop_requested)

        job = Job(request.session, request.epoch, SlotWork(repair))
        self.engine.store.prefetch(request.session)
        return self._submit(job)

    def stop_early(self, name: str) -> "Future[None]":
        """Stop the session's repairs early, for a turn: each promotes the best rows so far."""

        def stop() -> None:
            for job in (*self._active, *self._queued):
                job.stop_requested = job.stop_requested or job.session == name

        return self._call(stop)

    def build_episodes(
        self, request: wire.BuildEpisodesRequest
    ) -> "Future[wire.BuildEpisodesResult]":
        """Queue a build of episodes; cancelling it leaves the session as it is."""

        def build(resident: ResidentSession) -> Steps[wire.BuildEpisodesResult]:
            return run_build(self.engine, resident, request)

        return self._submit(Job(request.session, request.epoch, SlotWork(build), read_only=True))

    def open(self, request: wire.OpenRequest) -> "Future[wire.MemoryReport]":
        """Open a session as the request states; running jobs of it are cancelled first."""

        def restore(session: WorkerSession) -> Steps[wire.MemoryReport]:
            return run_open(self.engine, session, request)

        return self._submit_open(request.spec, request.state, StoreWork(restore))

    def fork(self, request: wire.ForkRequest) -> "Future[wire.ForkResult]":
        """Fork a session from another one. It needs a slot only if turns are replayed."""

        def restore(child: WorkerSession) -> Steps[wire.ForkResult]:
            return run_fork_from_state(self.engine, child, request)

        def replay(child: ResidentSession) -> Steps[wire.ForkResult]:
            return run_fork_replaying(self.engine, child, request)

        work = StoreWork(restore) if request.HasField("state") else SlotWork(replay)
        return self._submit_open(request.spec, request.state, work)

    def rebuild(self, request: wire.RebuildRequest) -> "Future[wire.RebuildResult]":
        """Compute a session's lost pages again, then open it."""

        def rebuild(resident: ResidentSession) -> Steps[wire.RebuildResult]:
            return run_rebuild(self.engine, resident, request)

        return self._submit_open(request.spec, request.state, SlotWork(rebuild))

    def release(self, request: wire.ReleaseRequest) -> "Future[None]":
        """Release a session that moved to another worker."""

        def release() -> "Future[None]":
            known = self.engine.sessions.get(request.session)
            if known is not None and known.config.epoch <= request.epoch:
                self._cancel_jobs(request.session)
                self._last_used.pop(request.session, None)
            return self.engine.release(request.session, request.epoch)

        return self._call_and_wait(release)

    def delete(self, request: wire.DeleteRequest) -> "Future[None]":
        """Delete a session, its running jobs, slot and rows, but for pages that others share."""

        def delete() -> "Future[None]":
            self._cancel_jobs(request.session)
            self._last_used.pop(request.session, None)
            return self.engine.delete(request.session, request.keep_pages)

        return self._call_and_wait(delete)

    def retain_only(self, request: wire.RetainOnlyRequest) -> "Future[list[str]]":
        """Delete the rows of sessions that were stored before the start and that are not named."""
        kept = shared_pages(request.shared)
        return self.engine.store_io.submit(
            lambda: self.engine.store.retain_only(list(request.sessions), kept)
        )

    def memory(self, name: str) -> "Future[wire.MemoryReport]":
        """Report a session's rows and bytes."""
        return self._call(lambda: self.engine.memory(self.engine.session(name)))

    def slots_in_use(self) -> int:
        """Count the slots of resident sessions."""
        return self.engine.cache.slots - self.engine.cache.free_slots()

    def queued(self) -> int:
        """Count the jobs that wait for a slot or for their session."""
        return len(self._queued)

    def close(self) -> None:
        """Cancel all jobs, stop the thread, finish the writes. Idempotent."""
        self._post(self._stop)
        self._thread.join()
        self.engine.close()

    # On the scheduler's thread

    def _run(self) -> None:
        while not self._closing:
            self._read_inbox(wait=not any(job.waiting is None for job in self._active))
            self._reap_cancelled()
            self._admit()
            self._decode_step()
            self._advance_one()
        self._read_inbox(wait=False)
        self._fail_all(Cancelled("the worker is closing"))

    def _read_inbox(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _admit(self) -> None:
        """Start queued jobs in their order, as far as sessions and slots are free."""
        busy = {job.session for job in self._active}
        for job in list(self._queued):
            if job.session in busy:
                continue
            busy.add(job.session)
            try:
                job.running = self._start(job)
            except Exception as error:  # an error here ends this job alone
                self._fail(job, error)
                continue
            if job.running is None:
                continue
            self._queued.remove(job)
            job.queued_seconds = time.perf_counter() - job.submitted
            self._active.append(job)

    def _start(self, job: Job) -> Steps[Any] | None:
        """Start a job; None while it waits for rows or a slot. Raises as `Engine.session`."""
        session = self.engine.session(job.session, job.epoch)
        if isinstance(job.work, StoreWork):
            return job.work.steps(session)
        if self._awaits_rows(session):
            return None
        resident = self._swap_in(session)
        return None if resident is None else job.work.steps(resident)

    def _awaits_rows(self, session: WorkerSession) -> bool:
        """Check if the read of rows for the session's slot is still running."""
        read = self.engine.store_io.fetch(session)
        if read is None or read.done():
            return False
        read.add_done_callback(lambda _: self._wake())
        return True

    def _swap_in(self, session: WorkerSession) -> ResidentSession | None:
        """Swap a session in, and the longest idle one out if needed; None if all slots are busy."""
        self._last_used[session.name] = time.monotonic()
        if session.slot is None and not self.engine.cache.free_slots():
            busy = {job.session for job in self._active}
            idle = [
                each
                for each in self.engine.sessions.values()
                if each.slot is not None and each.name not in busy
            ]
            if not idle:
                return None
            self.engine.swap_out(min(idle, key=lambda each: self._last_used.get(each.name, 0.0)))
        return self.engine.swap_in(session)

    def _decode_step(self) -> None:
        """Append one token to every session that decodes, in one forward pass."""
        jobs = [job for job in self._active if job.token is not None]
        if not jobs:
            return
        try:
            residents = [self.engine.resident(job.session) for job in jobs]
            tokens = torch.tensor([[job.token] for job in jobs])
            logits = self.engine.forward(residents, tokens)[:, -1]
            best = logits.argmax(-1).tolist()
        except Exception as error:  # a failed forward pass must end its turns, not the worker
            for job in jobs:
                self._fail(job, error)
            return
        for job, row, top in zip(jobs, logits, best, strict=True):
            self._advance(job, NextLogits(row, top))

    def _advance_one(self) -> None:
        """Take one step of one job that does not decode: jobs alternate, and decoding goes on."""
        for job in self._active:
            if job.waiting is not None and job.waiting.done():
                job.waiting = None
            if job.token is None and job.waiting is None:
                self._active.remove(job)
                self._active.append(job)
                self._advance(job, None)
                return

    def _advance(self, job: Job, answer: NextLogits | None) -> None:
        assert job.running is not None, "only a started job advances"
        job.token = None
        try:
            # A generator that has not started, or waits for nothing, is sent None.
            wanted = job.running.send(answer)  # type: ignore[arg-type]
        except StopIteration as finished:
            self._finish(job, finished.value)
        except Exception as error:  # any error ends this job alone
            self._fail(job, error)
        else:
            if isinstance(wanted, Future):
                job.waiting = wanted
                wanted.add_done_callback(lambda _: self._wake())
            else:
                job.token = wanted

    def _finish(self, job: Job, value: Any) -> None:
        self._active.remove(job)
        self._last_used[job.session] = time.monotonic()
        if isinstance(value, wire.TurnDone):
            value.seconds["queued"] = job.queued_seconds
        if not resolve(job.result, value) and not job.read_only:
            # Cancelled in its last step: the session's new state will never be committed.
            self._discard_session(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        if not isinstance(error, WorkerError):
            _log.error("job failed", session=job.session, exc_info=error)
        if job.running is not None:
            job.running.close()
        if job in self._queued:
            self._queued.remove(job)
        if job in self._active:
            self._active.remove(job)
            self._discard_session(job, only_dirty=True)
        resolve(job.result, error)

    def _discard_session(self, job: Job, only_dirty: bool = False) -> None:
        session = self.engine.sessions.get(job.session)
        if session is not None and (session.dirty or not only_dirty):
            self.engine.discard(session)

    def _fail_all(self, error: WorkerError) -> None:
        for job in (*self._active, *self._queued):
            self._fail(job, error)

    def _reap_cancelled(self) -> None:
        for job in [job for job in (*self._active, *self._queued) if job.result.cancelled()]:
            self._fail(job, Cancelled("cancelled by its caller"))

    def _cancel_jobs(self, name: str) -> None:
        for job in [job for job in (*self._active, *self._queued) if job.session == name]:
            self._fail(job, Cancelled(f"session {name} was deleted or opened again"))

    def _stop(self) -> None:
        with self._gate:
            self._closing = True
        self._fail_all(Cancelled("the worker is closing"))

    # From other threads

    def _post(self, message: Callable[[], None]) -> bool:
        """Put a message into the inbox; False once the scheduler's thread reads none."""
        with self._gate:
            if not self._closing:
                self._inbox.put(message)
            return not self._closing

    def _submit_open(
        self, spec: wire.SessionSpec, state: wire.SessionState, work: SlotWork | StoreWork
    ) -> "Future[Any]":
        """Queue a job that restores an empty session, in place of the session's other jobs."""

        def create_empty() -> None:
            self.engine.admit(spec, state)  # a refusal here must not cancel the session's jobs
            self._cancel_jobs(spec.session)
            self.engine.create_empty(spec, state)

        return self._submit(Job(spec.session, spec.epoch, work), create_empty)

    def _submit(self, job: Job, first: Callable[[], None] | None = None) -> "Future[Any]":
        def queue_up() -> None:
            if len(self._queued) + len(self._active) >= self.engine.settings.max_jobs:
                resolve(
                    job.result,
                    Overloaded(f"{self.engine.settings.max_jobs} jobs are waiting or running"),
                )
                return
            try:
                if first is not None:
                    first()
            except Exception as error:  # refused before it is queued
                resolve(job.result, error)
            else:
                self._queued.append(job)

        if not self._post(queue_up):
            resolve(job.result, Cancelled("the worker is closed"))
        job.result.add_done_callback(lambda _: self._wake())
        return job.result

    def _call_and_wait(self, function: "Callable[[], Future[_T]]") -> "Future[_T]":
        """Call a function that returns a future, as `_call`: the result is that of the future."""
        result: Future[_T] = Future()

        def chain(call: "Future[Future[_T]]") -> None:
            if error := call.exception():
                resolve(result, error)
            else:
                call.result().add_done_callback(
                    lambda done: resolve(result, done.exception() or done.result())
                )

        self._call(function).add_done_callback(chain)
        return result

    def _call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Run a function on the scheduler's thread, between two steps."""
        result: Future[_T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function())
            except Exception as error:  # raised in the caller
                result.set_exception(error)

        if not self._post(run):
            resolve(result, Cancelled("the worker is closed"))
        return result

    def _wake(self) -> None:
        self._post(lambda: None)
