"""The scheduler's thread: jobs, slots, and one decoding batch for all sessions that decode."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor

from kvrecall.domain.fairness.share import Share
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from kvrecall.telemetry.stopwatch import record_phase
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.errors import Cancelled, Overloaded, WorkerError
from workers.generation.sampling import Sampler, sample
from workers.generation.steps import Decode, Steps, Yielded
from workers.scheduler.fair_order import MOMENT_SECONDS, FairOrder
from workers.scheduler.idle import IdleSessions
from workers.scheduler.job import (
    Job,
    JobKind,
    JobState,
    ModelWork,
    SlotWork,
    StoreWork,
    resolve,
)

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class JobLoop:
    """Runs jobs on one thread of its own. Methods may be called from any thread unless they say so.

    A session's jobs run one after the other, in the order of their submission; between sessions the
    order is fair to tenants. A job starts when its session has a slot; a session without a running
    job is swapped out when another needs its slot, the longest idle one first, and if there is none,
    a job may be preempted between two of its steps. Sessions that are idle for long are released from memory; the
    next request for one is refused with UnknownSession, upon which its sender opens it again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = engine.metrics
        self._count_seconds = partial(self._metrics.add_seconds, "worker_busy_seconds_total")
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: list[Job] = []
        self._active: list[Job] = []
        self._order = FairOrder()
        settings = engine.settings
        self._idle = IdleSessions(settings.idle_seconds, settings.idle_bytes)
        self._closing = False
        self._gate = threading.Lock()  # nothing enters the inbox once closing is set
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, job: Job, first: Callable[[], None] | None = None) -> "Future[Any]":
        """Queue a job, after a call of `first`, whose error refuses it. Returns the job's result.

        Refuses with Overloaded when `max_jobs` are queued or running, or the tenant's share of them.
        """

        def queue_up() -> None:
            job.share = self._get_share(job)
            jobs, most = [*self._queued, *self._active], self._engine.settings.max_jobs
            if not self._order.has_room(job, jobs, most):
                message = f"{len(jobs)} jobs are waiting or running; the most are {most}"
                resolve(job.result, Overloaded(message))
                return
            try:
                if first is not None:
                    first()
            except Exception as error:  # refused before it is queued
                resolve(job.result, error)
            else:
                self._order.enter(job)
                self._queued.append(job)

        if not self._post(queue_up):
            resolve(job.result, Cancelled("the worker is closed"))
        job.result.add_done_callback(lambda _: self._wake())
        return job.result

    def call_and_wait(self, function: "Callable[[], Future[_T]]") -> "Future[_T]":
        """Call a function that returns a future, as `call`: the result is that of the future."""
        result: Future[_T] = Future()

        def chain(call: "Future[Future[_T]]") -> None:
            if error := call.exception():
                resolve(result, error)
            else:
                call.result().add_done_callback(
                    lambda done: resolve(result, done.exception() or done.result())
                )

        self.call(function).add_done_callback(chain)
        return result

    def call(self, function: Callable[[], _T]) -> "Future[_T]":
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

    def queued(self) -> int:
        """Count the jobs that wait for a slot or for their session."""
        return len(self._queued)

    def count_jobs(self) -> Counter[tuple[JobKind, JobState]]:
        """Count the jobs by kind and state."""
        counts = Counter[tuple[JobKind, JobState]]((job.kind, "queued") for job in self._queued)
        counts.update((job.kind, "running") for job in self._active)
        return counts

    def close(self) -> None:
        """Cancel all jobs and stop the thread. Idempotent."""
        self._post(self._stop)
        self._thread.join()

    # For calls on the loop's thread

    def cancel_jobs(self, name: str) -> None:
        """Cancel a session's jobs."""
        for job in [job for job in (*self._active, *self._queued) if job.session == name]:
            self._fail(job, Cancelled(f"session {name} was deleted or opened again"))

    def request_stop(self, name: str) -> None:
        """Ask a session's jobs to stop early."""
        for job in (*self._active, *self._queued):
            if job.session == name:
                job.hurry()

    def idle_seconds(self, session: WorkerSession) -> float:
        """Seconds since the session was opened or its last job ended; 0 while it has a job."""
        if any(job.session == session.name for job in (*self._active, *self._queued)):
            return 0.0
        last = max(session.opened_at, self._idle.last_use(session.name))
        return time.monotonic() - last

    def forget(self, name: str) -> None:
        """Cancel the jobs of a session that is closed."""
        self.cancel_jobs(name)
        self._idle.forget(name)

    # Internals

    def _run(self) -> None:
        while not self._closing:
            self._read_inbox(self._get_patience())
            self._reap_cancelled()
            self._release_idle()
            self._admit()
            self._advance_one()  # before the batch, which a job that has just come joins at once
            self._decode_step()
        self._read_inbox(0.0)
        self._fail_all(Cancelled("the worker is closing"))

    def _get_patience(self) -> float | None:
        """Seconds to wait for a message; None for as long as it takes."""
        if any(job.decoding is not None for job in self._active):
            return 0.0
        if any(job.waiting is None for job in self._active):
            return 0.0 if self._order.next_step(self._active) else MOMENT_SECONDS
        return self._idle.seconds_until_due(time.monotonic())

    def _read_inbox(self, patience: float | None) -> None:
        try:
            self._inbox.get(patience != 0, patience)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _get_share(self, job: Job) -> Share:
        """Complete a job's share by that of its session, as far as it is open."""
        session = self._engine.sessions.get(job.session)
        if session is None or job.opens:
            return job.share
        share = session.config.share
        return replace(share, flow=job.share.flow or share.flow, background=job.share.background)

    def _admit(self) -> None:
        """Start queued jobs in their fair order, as far as sessions and slots are free."""
        busy = {job.session for job in self._active}
        for job in self._order.heads(self._queued, busy):
            began = time.perf_counter()
            resumed = job.running is not None
            try:
                running = job.context.run(self._start, job)
            except Exception as error:  # an error here ends this job alone
                self._fail(job, error)
                continue
            if running is None:
                continue
            self._queued.remove(job)
            if not resumed:
                job.running = running
                self._engine.host_cache.pin(job.session)
                job.queued_seconds = time.perf_counter() - job.submitted
                job.context.run(record_phase, "queued", job.submitted, began)
            self._active.append(job)

    def _start(self, job: Job) -> Steps[Any] | None:
        """Start or resume a job; None while it waits for rows or a slot.

        Raises as `Engine.session`.
        """
        if isinstance(job.work, ModelWork):
            return job.work.steps()
        session = self._engine.session(job.session, job.epoch)
        self._idle.use(session.name, time.monotonic())
        if isinstance(job.work, StoreWork):
            return job.work.steps(session)
        if self._engine.is_stale(session):
            self._engine.swap_out(session)
        if self._awaits_rows(session):
            return None
        resident = self._swap_in(session, job)
        if resident is None:
            return None
        return job.running or job.work.steps(resident)

    def _awaits_rows(self, session: WorkerSession) -> bool:
        """Check if the read of rows for the session's slot is still running."""
        if session.preempted is not None:
            return False
        read = self._engine.store_io.fetch(session)
        if read is None or read.done():
            return False
        read.add_done_callback(lambda _: self._wake())
        return True

    def _swap_in(self, session: WorkerSession, job: Job) -> ResidentSession | None:
        """Swap a job's session in, and another out if needed; None if no slot can be had."""
        if session.slot is not None:
            return self._engine.swap_in(session)
        if not (self._engine.cache.free_slots() or self._swap_out_idle() or self._preempt(job)):
            return None
        with span("swap in"), self._count_seconds(kind="swap"):
            return self._engine.swap_in(session)

    def _swap_out_idle(self) -> bool:
        """Swap the longest idle session out; False if all sessions in slots have jobs."""
        busy = {job.session for job in self._active}
        idle = [
            each
            for each in self._engine.sessions.values()
            if each.slot is not None and each.name not in busy
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda each: self._idle.last_use(each.name))
        self._engine.swap_out(longest)
        self._idle.measure(longest.name, longest.nbytes)
        return True

    def _preempt(self, job: Job) -> bool:
        """Take the slot of a running job for this one, if that is fair; it is the next of its session.

        As many jobs are preempted at once as there are slots: their rows are in host memory.
        """
        preempted = sum(other.running is not None for other in self._queued)
        sessions = self._engine.sessions
        # Those without a slot have jobs that work in a scratch session's.
        names = {other.session for other in self._active} & sessions.keys()
        fixed = {name for name in names if sessions[name].slot is None}
        other = self._order.choose_preempted(job, self._active, fixed)
        if other is None or preempted >= self._engine.cache.slots:
            return False
        with self._count_seconds(kind="swap"):
            self._engine.preempt(sessions[other.session])
        self._active.remove(other)
        self._queued.insert(0, other)
        return True

    def _decode_step(self) -> None:
        """Append one token to every session that decodes, and sample the next, in one batch.

        Sessions behind the model's window have a batch of their own: their passes are computed otherwise,
        and no session's numbers depend on which others decode. If a pass fails, each session gets one of
        its own: an error ends only those jobs whose own pass raises it.
        """
        batches: dict[bool, list[tuple[Job, Decode]]] = {}
        for job in self._active:
            if job.decoding is not None:
                session = self._engine.sessions.get(job.session)
                behind = session is not None and self._engine.long_sessions.is_behind(session)
                batches.setdefault(behind, []).append((job, job.decoding))
        for jobs in batches.values():
            with self._count_seconds(kind="decode"):
                self._decode_together(jobs)

    def _decode_together(self, jobs: list[tuple[Job, Decode]]) -> None:
        if (error := self._decode(jobs)) is None:
            return
        if len(jobs) == 1:
            self._fail(jobs[0][0], error)
            return
        _log.warning("joint forward pass failed", sessions=len(jobs), reason=type(error).__name__)
        del error  # its traceback holds the memory of the failed pass
        for job, decoding in jobs:
            if (own := self._decode([(job, decoding)])) is not None:
                self._fail(job, own)

    def _decode(self, jobs: list[tuple[Job, Decode]]) -> Exception | None:
        """Append the jobs' tokens in one forward pass; return its error if it appended none."""
        try:
            batch = [(self._engine.resident(job.session), job, decoding) for job, decoding in jobs]
            # Neighbouring slots in ascending order are read without a copy.
            batch.sort(key=lambda entry: entry[0].slot)
            tokens = torch.tensor([[decoding.token] for _, _, decoding in batch])
            began = time.perf_counter()
            logits = self._engine.forward([resident for resident, _, _ in batch], tokens)[:, -1]
            for _, job, _ in batch:
                self._engine.usage.recount(job.session, "decoded", 1)
            seconds = time.perf_counter() - began
        except Exception as error:  # a failed forward pass must end its turns, not the worker
            return error
        self._metrics.observe("worker_step_seconds", seconds, kind="decode")
        self._metrics.observe("worker_batch_sessions", len(batch))
        self._order.charge_decoding([job for _, job, _ in batch])
        self._sample(logits, [(job, decoding.sampler) for _, job, decoding in batch])
        return None

    def _sample(self, logits: Tensor, jobs: list[tuple[Job, Sampler]]) -> None:
        """Sample the next tokens and advance the jobs; an error ends those it is raised for alone.

        The tokens before are appended, so the pass is not repeated.
        """
        try:
            tokens = sample(logits, [sampler for _, sampler in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0][0], error)
                return
            _log.warning("joint sampling failed", sessions=len(jobs), reason=type(error).__name__)
        else:
            for (job, _), token in zip(jobs, tokens, strict=True):
                self._advance(job, token)
            return
        for row, one in enumerate(jobs):
            self._sample(logits[row : row + 1], [one])

    def _advance_one(self) -> None:
        """Take one step of one job that does not decode: jobs alternate, and decoding goes on."""
        for job in self._active:
            if job.waiting is not None and job.waiting.done():
                job.waiting = None
        chosen = self._order.next_step(self._active)
        if chosen is not None:
            self._active.remove(chosen)
            self._active.append(chosen)
            with self._count_seconds(kind=chosen.kind):
                self._advance(chosen, None)

    def _advance(self, job: Job, sampled: int | None) -> None:
        job.decoding = None
        try:
            wanted = self._step(job, sampled)
        except StopIteration as finished:
            self._finish(job, finished.value)
        except Exception as error:  # any error ends this job alone
            self._fail(job, error)
        else:
            if isinstance(wanted, Future):
                job.waiting = wanted
                job.waiting_since = time.monotonic()
                wanted.add_done_callback(lambda _: self._wake())
            else:
                job.decoding = wanted

    def _step(self, job: Job, sampled: int | None) -> Yielded:
        """Take a job's next step, and charge it. Raises as the job does, StopIteration at its end."""
        assert job.running is not None, "only a started job advances"
        passed = self._engine.passed_tokens
        try:
            # A generator that has not started, or waits for nothing, is sent None.
            return job.context.run(job.running.send, sampled)  # type: ignore[arg-type]
        finally:
            passed = self._engine.passed_tokens - passed
            if passed or sampled is None:
                self._order.charge(job, passed)

    def _finish(self, job: Job, value: Any) -> None:
        self._active.remove(job)
        self._order.leave(job)
        self._engine.host_cache.unpin(job.session)
        self._measure(job.session)
        if isinstance(job.work, SlotWork):
            # Behind the job, not before it: the first token waits for the rows of the slot alone.
            self._engine.store.prefetch(job.session)
        if isinstance(value, pb.TurnDone):
            value.seconds["queued"] = job.queued_seconds
        if not resolve(job.result, value) and not job.read_only:
            # Cancelled in its last step: the session's new state will never be committed.
            self._discard_session(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        if not isinstance(error, WorkerError):
            job.context.run(_log.error, "job failed", session=job.session, exc_info=error)
        if job.running is not None:
            job.running.close()
            self._engine.host_cache.unpin(job.session)
            if (session := self._engine.sessions.get(job.session)) is not None:
                session.preempted = None
        for jobs in (self._queued, self._active):
            if job in jobs:
                jobs.remove(job)
                self._order.leave(job)
        if job.running is not None or job.opens:
            self._discard_session(job, only_dirty=True)
            self._measure(job.session)
        resolve(job.result, error)

    def _discard_session(self, job: Job, only_dirty: bool = False) -> None:
        session = self._engine.sessions.get(job.session)
        if session is not None and (session.dirty or not only_dirty):
            self._engine.discard(session)

    def _measure(self, name: str) -> None:
        """Record the end of a session's job: from now on it is idle."""
        session = self._engine.sessions.get(name)
        if session is not None:
            self._idle.use(name, time.monotonic())
            self._idle.measure(name, session.nbytes)

    def _release_idle(self) -> None:
        """Release sessions that are idle for long, or that together hold too much memory."""
        jobs = (*self._active, *self._queued)
        busy = {job.session for job in jobs}
        for name in self._idle.take_due(busy, time.monotonic()):
            self._engine.unload(name)

    def _fail_all(self, error: WorkerError) -> None:
        for job in (*self._active, *self._queued):
            self._fail(job, error)

    def _reap_cancelled(self) -> None:
        for job in [job for job in (*self._active, *self._queued) if job.result.cancelled()]:
            self._fail(job, Cancelled("cancelled by its caller"))

    def _stop(self) -> None:
        with self._gate:
            self._closing = True
        self._fail_all(Cancelled("the worker is closing"))

    def _post(self, message: Callable[[], None]) -> bool:
        """Put a message into the inbox; False once the scheduler's thread reads none."""
        with self._gate:
            if not self._closing:
                self._inbox.put(message)
            return not self._closing

    def _wake(self) -> None:
        self._post(lambda: None)
