"""The scheduler's thread: what is done next, for jobs, slots, and one decoding batch of all sessions."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from kvrecall.domain.fairness.share import Share
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.errors import Cancelled, Overloaded
from workers.parallel.decision import Decision
from workers.scheduler.fair_order import MOMENT_SECONDS
from workers.scheduler.job import CommonWork, Job, JobKind, JobState, SlotWork, resolve
from workers.scheduler.job_runner import JobRunner

_T = TypeVar("_T")


class JobLoop:
    """Runs jobs on one thread of its own. Methods may be called from any thread unless they say so.

    A session's jobs run one after the other, in the order of their submission; between sessions the
    order is fair to tenants. A job starts when its session has a slot; a session without a running
    job is swapped out when another needs its slot, the longest idle one first, and if there is none,
    a job may be preempted between two of its steps. Sessions that are idle for long are released from memory; the
    next request for one is refused with UnknownSession, upon which its sender opens it again.

    It decides and its `runner` acts. Where a worker is several processes, this is rank 0's: the others
    learn of each decision before it is carried out.
    """

    def __init__(self, engine: Engine) -> None:
        self.runner = JobRunner(engine)
        self._engine = engine
        self._group = engine.group
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._entered = 0
        self._closing = False
        self._gate = threading.Lock()  # nothing enters the inbox once closing is set
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._group.meet()
        self._thread.start()

    def submit(self, job: Job) -> "Future[Any]":
        """Queue a job. Returns its result.

        Refuses with Overloaded when `max_jobs` are queued or running, or the tenant's share of them.
        """

        def queue_up() -> None:
            job.share = self._get_share(job)
            jobs, most = self.runner.jobs, self._engine.settings.max_jobs
            is_common = isinstance(job.work, CommonWork)
            if not is_common and not self.runner.order.has_room(job, jobs, most):
                message = f"{len(jobs)} jobs are waiting or running; the most are {most}"
                resolve(job.result, Overloaded(message))
                return
            self._entered += 1
            job.number = self._entered
            self._announce(Decision("enter", (job.number,), request=job.request))
            self.runner.enter(job)

        if not self._post(queue_up):
            resolve(job.result, Cancelled("the worker is closed"))
        job.result.add_done_callback(lambda _: self._wake())
        return job.result

    def call_and_wait(
        self, function: "Callable[[], Future[_T]]", decision: Decision | None = None
    ) -> "Future[_T]":
        """Call a function that returns a future, as `call`: the result is that of the future."""
        result: Future[_T] = Future()

        def chain(call: "Future[Future[_T]]") -> None:
            if error := call.exception():
                resolve(result, error)
            else:
                call.result().add_done_callback(
                    lambda done: resolve(result, done.exception() or done.result())
                )

        self.call(function, decision).add_done_callback(chain)
        return result

    def call(self, function: Callable[[], _T], decision: Decision | None = None) -> "Future[_T]":
        """Run a function on the scheduler's thread, between two steps.

        decision: has all ranks do the same, each with what it has.
        """
        result: Future[_T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                if decision is not None:
                    self._announce(decision)
                result.set_result(function())
            except Exception as error:  # raised in the caller
                result.set_exception(error)

        if not self._post(run):
            resolve(result, Cancelled("the worker is closed"))
        return result

    def queued(self) -> int:
        """Count the jobs that wait for a slot or for their session."""
        return len(self.runner.queued)

    def count_jobs(self) -> Counter[tuple[JobKind, JobState]]:
        """Count the jobs by kind and state."""
        runner = self.runner
        counts = Counter[tuple[JobKind, JobState]]((job.kind, "queued") for job in runner.queued)
        counts.update((job.kind, "running") for job in runner.active)
        return counts

    def close(self) -> None:
        """Cancel all jobs and stop the thread. Idempotent."""
        self._post(self._stop)
        self._thread.join()

    def idle_seconds(self, session: WorkerSession) -> float:
        """Seconds since the session was opened or its last job ended; 0 while it has a job."""
        if any(job.session == session.name for job in self.runner.jobs):
            return 0.0
        last = max(session.opened_at, self.runner.idle.last_use(session.name))
        return time.monotonic() - last

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
        self._fail_all()
        self._announce(Decision("close"))

    def _announce(self, decision: Decision) -> None:
        """Tell the other ranks what is done next."""
        self._group.lead(decision)

    def _get_patience(self) -> float | None:
        """Seconds to wait for a message; None for as long as it takes."""
        active = self.runner.active
        if any(job.decoding is not None for job in active):
            return 0.0
        if any(job.waiting is None for job in active):
            return 0.0 if self.runner.order.next_step(active) else MOMENT_SECONDS
        return self.runner.idle.seconds_until_due(time.monotonic())

    def _read_inbox(self, patience: float | None) -> None:
        try:
            self._wait_for_message(patience)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _wait_for_message(self, patience: float | None) -> Callable[[], None]:
        """Wait for a message; the other ranks hear meanwhile that this one is there. Raises Empty."""
        beat = self._group.beat_seconds
        while beat is not None and (patience is None or patience > beat):
            try:
                return self._inbox.get(timeout=beat)
            except queue.Empty:
                self._announce(Decision("nothing"))
                patience = None if patience is None else patience - beat
        return self._inbox.get(patience != 0, patience)

    def _get_share(self, job: Job) -> Share:
        """Complete a job's share by that of its session, as far as it is open."""
        session = self._engine.sessions.get(job.session)
        if session is None or job.opens:
            return job.share
        share = session.config.share
        return replace(share, flow=job.share.flow or share.flow, background=job.share.background)

    def _admit(self) -> None:
        """Start queued jobs in their fair order, as far as sessions and slots are free."""
        busy = {job.session for job in self.runner.active}
        for job in self.runner.order.heads(self.runner.queued, busy):
            if self._can_start(job):
                self._announce(Decision("start", (job.number,)))
                self.runner.start(job)

    def _can_start(self, job: Job) -> bool:
        """Make room for a job; False while it waits for rows or a slot."""
        session = self._engine.sessions.get(job.session)
        if session is None or session.discarded or session.config.epoch != job.epoch:
            return True  # it fails, or has no session
        self.runner.idle.use(session.name, time.monotonic())
        if not isinstance(job.work, SlotWork):
            return True
        if self._engine.is_stale(session):
            self._swap_out(session.name)
        if self._awaits_rows(session):
            return False
        return bool(
            session.slot is not None
            or self._engine.cache.free_slots()
            or self._swap_out_idle()
            or self._preempt(job)
        )

    def _awaits_rows(self, session: WorkerSession) -> bool:
        """Check if the read of rows for the session's slot is still running."""
        if session.preempted is not None:
            return False
        if session.slot is None and session.selection is not None and session.prefetched is None:
            self._announce(Decision("fetch", session=session.name))
        read = self.runner.fetch(session.name)
        if read is None or read.done():
            return False
        read.add_done_callback(lambda _: self._wake())
        return True

    def _swap_out_idle(self) -> bool:
        """Swap the longest idle session out; False if all sessions in slots have jobs."""
        busy = {job.session for job in self.runner.active}
        idle = [
            each
            for each in self._engine.sessions.values()
            if each.slot is not None and each.name not in busy
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda each: self.runner.idle.last_use(each.name))
        self._swap_out(longest.name)
        return True

    def _swap_out(self, name: str) -> None:
        self._announce(Decision("swap out", session=name))
        self.runner.swap_out(name)

    def _preempt(self, job: Job) -> bool:
        """Take the slot of a running job for this one, if that is fair; it is the next of its session.

        As many jobs are preempted at once as there are slots: their rows are in host memory.
        """
        runner = self.runner
        preempted = sum(other.running is not None for other in runner.queued)
        sessions = self._engine.sessions
        # Those without a slot have jobs that work in a scratch session's.
        names = {other.session for other in runner.active} & sessions.keys()
        fixed = {name for name in names if sessions[name].slot is None}
        other = runner.order.choose_preempted(job, runner.active, fixed)
        if other is None or preempted >= self._engine.cache.slots:
            return False
        self._announce(Decision("preempt", (other.number,)))
        runner.preempt(other)
        return True

    def _decode_step(self) -> None:
        """Append one token to every session that decodes, and sample the next, in one batch.

        Sessions behind the model's window have a batch of their own: their passes are computed otherwise,
        and no session's numbers depend on which others decode.
        """
        batches: dict[bool, list[Job]] = {}
        for job in self.runner.active:
            if job.decoding is not None:
                session = self._engine.sessions.get(job.session)
                behind = session is not None and self._engine.long_sessions.is_behind(session)
                batches.setdefault(behind, []).append(job)
        for jobs in batches.values():
            self._announce(Decision("decode", tuple(job.number for job in jobs)))
            self.runner.decode(jobs)
        self._watch(job for jobs in batches.values() for job in jobs)

    def _advance_one(self) -> None:
        """Take one step of one job that does not decode: jobs alternate, and decoding goes on."""
        for job in self.runner.active:
            if job.waiting is not None and job.waiting.done():
                job.waiting = None
        chosen = self.runner.order.next_step(self.runner.active)
        if chosen is not None:
            self._announce(Decision("advance", (chosen.number,)))
            self.runner.advance_next(chosen)
            self._watch([chosen])

    def _watch(self, jobs: Iterable[Job]) -> None:
        """Wake up when what jobs wait for is done."""
        for job in jobs:
            if job.waiting is not None:
                job.waiting.add_done_callback(lambda _: self._wake())

    def _release_idle(self) -> None:
        """Release sessions that are idle for long, or that together hold too much memory."""
        busy = {job.session for job in self.runner.jobs}
        for name in self.runner.idle.take_due(busy, time.monotonic()):
            self._announce(Decision("unload", session=name))
            self._engine.unload(name)

    def _reap_cancelled(self) -> None:
        for job in [job for job in self.runner.jobs if job.result.cancelled()]:
            self._announce(Decision("fail", (job.number,)))
            self.runner.fail(job, Cancelled("cancelled by its caller"))

    def _stop(self) -> None:
        with self._gate:
            self._closing = True
        self._fail_all()

    def _fail_all(self) -> None:
        self._announce(Decision("fail", tuple(job.number for job in self.runner.jobs)))
        self.runner.fail_all(Cancelled("the worker is closing"))

    def _post(self, message: Callable[[], None]) -> bool:
        """Put a message into the inbox; False once the scheduler's thread reads none."""
        with self._gate:
            if not self._closing:
                self._inbox.put(message)
            return not self._closing

    def _wake(self) -> None:
        self._post(lambda: None)
