"""Many sessions on one device: slots, and one decoding step for all that decode."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
import torch

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.format.page_table import SharedPages
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.episodes.build import run_build
from workers.errors import Cancelled, Overloaded, WorkerError
from workers.generation.decode import NextLogits
from workers.repair.repair import run_pause_repair
from workers.scheduler.job import Job, Steps, resolve
from workers.tasks.open import run_fork, run_open, run_rebuild
from workers.tasks.turn import Emit, run_turn

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class Scheduler:
    """Runs jobs on one thread of its own. The public methods may be called from any thread.

    A session's jobs run one after the other, in the order they came. A job starts when its session has a slot; a
    session without a running job gives its slot up when another needs it, the longest idle one first.
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
        """Queue a turn; `emit` is called on the scheduler's thread with its token and tool-call events.

        Cancel the future to cancel the turn. Its exceptions are `workers.errors`.
        """
        self.engine.store.prefetch(request.session)
        return self._submit(
            Job(
                request.session,
                request.epoch,
                lambda session: run_turn(self.engine, session, request, emit),
            )
        )

    def repair(self, request: wire.RepairRequest) -> "Future[wire.RepairResult]":
        """Queue a repair between turns."""

        def repair(session: WorkerSession) -> Steps:
            return run_pause_repair(self.engine, session, request, lambda: job.hurried)

        job = Job(request.session, request.epoch, repair)
        self.engine.store.prefetch(request.session)
        return self._submit(job)

    def hurry(self, name: str) -> "Future[None]":
        """A turn has come: the session's repairs end at once, with what they have found so far."""

        def hurried() -> None:
            for job in (*self._active, *self._queued):
                job.hurried = job.hurried or job.session == name

        return self._call(hurried)

    def build_episodes(
        self, request: wire.BuildEpisodesRequest
    ) -> "Future[wire.BuildEpisodesResult]":
        """Queue a build of episodes; cancelling it leaves the session as it is."""

        def build(session: WorkerSession) -> Steps:
            return run_build(self.engine, session, request)

        return self._submit(Job(request.session, request.epoch, build, leaves_session=True))

    def open(self, request: wire.OpenRequest) -> "Future[wire.MemoryReport]":
        """Make a session be what the request says; jobs of it that still run are cancelled first."""
        return self._enter(
            request.spec, request.state, lambda session: run_open(self.engine, session, request)
        )

    def fork(self, request: wire.ForkRequest) -> "Future[wire.ForkResult]":
        """Make a session that begins as another one was. It needs a slot only where turns are said again."""
        seated = not request.HasField("state")
        state = request.state
        return self._enter(
            request.spec, state, lambda child: run_fork(self.engine, child, request), seated=seated
        )

    def rebuild(self, request: wire.RebuildRequest) -> "Future[wire.RebuildResult]":
        """Compute a session's lost pages again, then open it."""

        def rebuild(session: WorkerSession) -> Steps:
            return run_rebuild(self.engine, session, request)

        return self._enter(request.spec, request.state, rebuild, seated=True)

    def release(self, request: wire.ReleaseRequest) -> "Future[None]":
        """Let a session go that goes on in another worker."""

        def released() -> "Future[None]":
            known = self.engine.sessions.get(request.session)
            if known is not None and known.epoch <= request.epoch:
                self._cancel_jobs_of(request.session)
                self._last_used.pop(request.session, None)
            return self.engine.release(request.session, request.epoch)

        return self._call_and_wait(released)

    def drop(self, request: wire.DropRequest) -> "Future[None]":
        """Forget a session, its running jobs, slot and rows, but for pages that others share."""

        def dropped() -> "Future[None]":
            self._cancel_jobs_of(request.session)
            self._last_used.pop(request.session, None)
            return self.engine.drop(request.session, request.keep_pages)

        return self._call_and_wait(dropped)

    def retain(self, request: wire.RetainRequest) -> "Future[list[str]]":
        """Of the sessions stored before the start, drop the rows of those that are not named."""
        kept = [SharedPages(shared.owner, shared.pages) for shared in request.shared]
        return self.engine.storing.do(
            lambda: self.engine.store.retain_only(list(request.sessions), kept)
        )

    def memory(self, name: str) -> "Future[wire.MemoryReport]":
        """What a session holds now."""
        return self._call(lambda: self.engine.memory(self.engine.session(name)))

    def slots_in_use(self) -> int:
        """Slots that a session holds."""
        return self.engine.cache.slots - self.engine.cache.free_slots()

    def queued(self) -> int:
        """Jobs that wait for a slot or for their session."""
        return len(self._queued)

    def close(self) -> None:
        """Cancel what runs, stop the thread, finish the writes. Safe to call twice."""
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
                session = self.engine.session(job.session, job.epoch)
                if job.seated and self._awaits_rows(session):
                    continue
                if job.seated and not self._seat(session):
                    continue
                job.running = job.steps(session)
            except Exception as error:  # what breaks here ends this job alone
                self._fail(job, error)
                continue
            self._queued.remove(job)
            job.queued_seconds = time.perf_counter() - job.submitted
            self._active.append(job)

    def _awaits_rows(self, session: WorkerSession) -> bool:
        """Whether rows that the session needs in its slot are still on their way from the store."""
        arriving = self.engine.storing.fetch(session)
        if arriving is None or arriving.done():
            return False
        arriving.add_done_callback(lambda _: self._wake())
        return True

    def _seat(self, session: WorkerSession) -> bool:
        """Give the session a slot, swapping out the longest idle one when none is free; False when all are busy."""
        self._last_used[session.name] = time.monotonic()
        if session.slot is None and not self.engine.cache.free_slots():
            busy = {job.session for job in self._active}
            idle = [
                s
                for s in self.engine.sessions.values()
                if s.slot is not None and s.name not in busy
            ]
            if not idle:
                return False
            self.engine.unseat(min(idle, key=lambda s: self._last_used.get(s.name, 0.0)))
        self.engine.seat(session)
        return True

    def _decode_step(self) -> None:
        """Say one token of every session that decodes, in one forward pass."""
        jobs = [job for job in self._active if job.token is not None]
        if not jobs:
            return
        try:
            sessions = [self.engine.session(job.session) for job in jobs]
            logits = self.engine.forward(sessions, torch.tensor([[job.token] for job in jobs]))[
                :, -1
            ]
            best = logits.argmax(-1).tolist()
        except Exception as error:  # a failed forward pass must end its turns, not the worker
            for job in jobs:
                self._fail(job, error)
            return
        for job, row, top in zip(jobs, logits, best, strict=True):
            self._advance(job, NextLogits(row, top))

    def _advance_one(self) -> None:
        """Take one step of one job that does not decode: jobs take turns, and decoding goes on in between."""
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
        except Exception as error:  # whatever broke, it ends this job alone
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
        if not resolve(job.result, value) and not job.leaves_session:
            # Cancelled in its last step: the caller will never commit what the session now holds.
            self._abandon(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        if not isinstance(error, WorkerError):
            _log.error("a job failed", session=job.session, exc_info=error)
        if job.running is not None:
            job.running.close()
        if job in self._queued:
            self._queued.remove(job)
        if job in self._active:
            self._active.remove(job)
            self._abandon(job, unless_settled=True)
        resolve(job.result, error)

    def _abandon(self, job: Job, unless_settled: bool = False) -> None:
        session = self.engine.sessions.get(job.session)
        if session is not None and (session.unsettled or not unless_settled):
            self.engine.abandon(session)

    def _fail_all(self, error: WorkerError) -> None:
        for job in (*self._active, *self._queued):
            self._fail(job, error)

    def _reap_cancelled(self) -> None:
        for job in [job for job in (*self._active, *self._queued) if job.result.cancelled()]:
            self._fail(job, Cancelled("cancelled by its caller"))

    def _cancel_jobs_of(self, name: str) -> None:
        for job in [job for job in (*self._active, *self._queued) if job.session == name]:
            self._fail(job, Cancelled(f"session {name} was dropped or opened anew"))

    def _stop(self) -> None:
        with self._gate:
            self._closing = True
        self._fail_all(Cancelled("the worker is closing"))

    # From other threads

    def _post(self, message: Callable[[], None]) -> bool:
        """Hand a message to the scheduler's thread; False when it no longer reads any."""
        with self._gate:
            if not self._closing:
                self._inbox.put(message)
            return not self._closing

    def _enter(
        self,
        spec: wire.SessionSpec,
        state: wire.SessionState,
        steps: Callable[[WorkerSession], Steps],
        *,
        seated: bool = False,
    ) -> "Future[Any]":
        """Queue the job that fills a blank session, in place of whatever ran in the session."""

        def blank() -> None:
            self.engine.admit(spec, state)  # whoever is refused here cancels nobody's jobs
            self._cancel_jobs_of(spec.session)
            self.engine.blank(spec, state)

        return self._submit(Job(spec.session, spec.epoch, steps, seated=seated), blank)

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
            except Exception as error:  # refused before it is a job
                resolve(job.result, error)
            else:
                self._queued.append(job)

        if not self._post(queue_up):
            resolve(job.result, Cancelled("the worker is closed"))
        job.result.add_done_callback(lambda _: self._wake())
        return job.result

    def _call_and_wait(self, function: "Callable[[], Future[_T]]") -> "Future[_T]":
        """As `_call`, and wait for what the function began."""
        result: Future[_T] = Future()

        def begun(call: "Future[Future[_T]]") -> None:
            if error := call.exception():
                resolve(result, error)
            else:
                call.result().add_done_callback(
                    lambda done: resolve(result, done.exception() or done.result())
                )

        self._call(function).add_done_callback(begun)
        return result

    def _call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Run a function on the scheduler's thread, between two steps."""
        result: Future[_T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function())
            except Exception as error:  # carried to the caller
                result.set_exception(error)

        if not self._post(run):
            resolve(result, Cancelled("the worker is closed"))
        return result

    def _wake(self) -> None:
        self._post(_nothing)


def _nothing() -> None:
    """Wakes the scheduler."""
