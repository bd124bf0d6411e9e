"""What the scheduler's decisions do to jobs and sessions; every rank of a worker takes the same ones."""

import time
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from kvrecall.telemetry.stopwatch import record_phase
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.errors import Cancelled, WorkerError
from workers.generation.sampling import Sampler, sample
from workers.generation.steps import Decode, Steps, Yielded
from workers.scheduler.fair_order import FairOrder
from workers.scheduler.idle import IdleSessions
from workers.scheduler.job import Job, ModelWork, SlotWork, StoreWork, resolve

_log = structlog.get_logger(__name__)


class JobRunner:
    """Jobs of a scheduler, and the actions on them. Only the scheduler's thread calls it.

    Where a worker is several processes, each has the same jobs and takes the same actions. An action
    that fails on one of them fails on all.

    Attributes:
        queued: Jobs that wait for a slot or for their session.
        active: Jobs that have started, the one that stepped last at the end.
        order: Their fair order.
        idle: Open sessions by their last use.
    """

    def __init__(self, engine: Engine) -> None:
        self.queued: list[Job] = []
        self.active: list[Job] = []
        self.order = FairOrder()
        settings = engine.settings
        self.idle = IdleSessions(settings.idle_seconds, settings.idle_bytes)
        self._engine = engine
        self._group = engine.group
        self._metrics = engine.metrics
        self.count_seconds = partial(self._metrics.add_seconds, "worker_busy_seconds_total")

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs that have not ended."""
        return (*self.active, *self.queued)

    def enter(self, job: Job) -> None:
        """Queue a job, or refuse it by an error. One that opens a session takes the place of its jobs."""
        try:
            if job.opening is not None:
                # A refusal here must not cancel the session's jobs.
                self._engine.admit(*job.opening)
                self.cancel_jobs(job.session)
                self._engine.create_empty(*job.opening)
        except Exception as error:  # refused before it is queued
            resolve(job.result, error)
        else:
            self.order.enter(job)
            self.queued.append(job)

    def start(self, job: Job) -> None:
        """Start a job, or let one that was preempted go on; its session gets a slot, which is free."""
        began = time.perf_counter()
        resumed, resident = job.running is not None, self._is_resident(job.session)
        running, failed = None, None
        try:
            running = job.context.run(self._create_steps, job)
        except Exception as error:  # an error here ends this job alone
            failed = error
        if (failed := self._group.agree(failed)) is not None:
            if not resident:
                # Its rows may be there on this rank alone: the ranks' slots are taken alike.
                self._give_back(job.session)
            self.fail(job, failed)
            return
        self.queued.remove(job)
        if not resumed:
            job.running = running
            self._engine.host_cache.pin(job.session)
            job.queued_seconds = time.perf_counter() - job.submitted
            job.context.run(record_phase, "queued", job.submitted, began)
        self.active.append(job)

    def advance(self, job: Job, sampled: int | None) -> None:
        """Take a job's next step; sampled: the token that it waits for, if it decodes."""
        job.decoding = None
        wanted: Yielded = None
        failed: Exception | None = None
        finished: StopIteration | None = None
        try:
            wanted = self._step(job, sampled)
        except StopIteration as ended:
            finished = ended
        except Exception as error:  # any error ends this job alone
            failed = error
        if (failed := self._group.agree(failed)) is not None:
            self.fail(job, failed)
        elif finished is not None:
            self._finish(job, finished.value)
        elif isinstance(wanted, Future):
            job.waiting = wanted
            job.waiting_since = time.monotonic()
        else:
            job.decoding = wanted

    def advance_next(self, job: Job) -> None:
        """Take a step of a job that does not decode: jobs alternate."""
        self.active.remove(job)
        self.active.append(job)
        if job.waiting is not None:
            wait([job.waiting])  # on rank 0 it is done
            job.waiting = None
        with self.count_seconds(kind=job.kind):
            self.advance(job, None)

    def decode(self, jobs: list[Job]) -> None:
        """Append a token to sessions that decode, and sample the next, in one batch.

        If the pass fails, each session gets one of its own: an error ends only those jobs whose own pass
        raises it.
        """
        pairs = [(job, job.decoding) for job in jobs if job.decoding is not None]
        with self.count_seconds(kind="decode"):
            if (error := self._decode(pairs)) is None:
                return
            if len(pairs) == 1:
                self.fail(pairs[0][0], error)
                return
            _log.warning(
                "joint forward pass failed", sessions=len(jobs), reason=type(error).__name__
            )
            del error  # its traceback holds the memory of the failed pass
            for pair in pairs:
                if (own := self._decode([pair])) is not None:
                    self.fail(pair[0], own)

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job by an error."""
        if not isinstance(error, WorkerError):
            job.context.run(_log.error, "job failed", session=job.session, exc_info=error)
        if job.running is not None:
            job.running.close()
            self._engine.host_cache.unpin(job.session)
            if (session := self._engine.sessions.get(job.session)) is not None:
                session.preempted = None
        for jobs in (self.queued, self.active):
            if job in jobs:
                jobs.remove(job)
                self.order.leave(job)
        if job.running is not None or job.opens:
            self._discard_session(job, only_dirty=True)
            self._measure(job.session)
        resolve(job.result, error)

    def fail_all(self, error: WorkerError) -> None:
        """End all jobs by an error."""
        for job in self.jobs:
            self.fail(job, error)

    def cancel_jobs(self, name: str) -> None:
        """Cancel a session's jobs."""
        for job in [job for job in self.jobs if job.session == name]:
            self.fail(job, Cancelled(f"session {name} was deleted or opened again"))

    def request_stop(self, name: str) -> None:
        """Ask a session's jobs to stop early."""
        for job in self.jobs:
            if job.session == name:
                job.hurry()

    def forget(self, name: str) -> None:
        """Cancel the jobs of a session that is closed."""
        self.cancel_jobs(name)
        self.idle.forget(name)

    def fetch(self, name: str) -> "Future[Any] | None":
        """Begin to read the rows for a session's slot; None if it needs none."""
        return self._engine.store_io.fetch(self._engine.session(name))

    def swap_out(self, name: str) -> None:
        """Free a session's slot."""
        session = self._engine.sessions[name]
        self._engine.swap_out(session)
        self.idle.measure(name, session.nbytes)

    def preempt(self, job: Job) -> None:
        """Take the slot of a running job; it is the next of its session."""
        with self.count_seconds(kind="swap"):
            self._engine.preempt(self._engine.sessions[job.session])
        self.active.remove(job)
        self.queued.insert(0, job)

    # Internals

    def _is_resident(self, name: str) -> bool:
        session = self._engine.sessions.get(name)
        return session is not None and session.slot is not None

    def _give_back(self, name: str) -> None:
        """Free a session's slot, if it has one."""
        if self._is_resident(name):
            self.swap_out(name)

    def _create_steps(self, job: Job) -> Steps[Any]:
        """Create a job's steps, or return those that it has. Raises as `Engine.session`."""
        if isinstance(job.work, ModelWork):
            return job.work.steps()
        session = self._engine.session(job.session, job.epoch)
        if isinstance(job.work, StoreWork):
            return job.work.steps(session)
        if session.slot is not None:
            resident = self._engine.swap_in(session)
        else:
            with span("swap in"), self.count_seconds(kind="swap"):
                resident = self._engine.swap_in(session)
        return job.running or job.work.steps(resident)

    def _decode(self, jobs: list[tuple[Job, Decode]]) -> Exception | None:
        """Append the jobs' tokens in one forward pass; return its error if it appended none."""
        batch, logits, failed = list[tuple[ResidentSession, Job, Decode]](), torch.empty(0), None
        seconds = 0.0
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
            failed = error
        if (failed := self._group.agree(failed)) is not None:
            return failed
        self._metrics.observe("worker_step_seconds", seconds, kind="decode")
        self._metrics.observe("worker_batch_sessions", len(batch))
        self.order.charge_decoding([job for _, job, _ in batch])
        self._sample(logits, [(job, decoding.sampler) for _, job, decoding in batch])
        return None

    def _sample(self, logits: Tensor, jobs: list[tuple[Job, Sampler]]) -> None:
        """Sample the next tokens and advance the jobs; an error ends those it is raised for alone.

        The tokens before are appended, so the pass is not repeated.
        """
        tokens, failed = list[int](), None
        try:
            tokens = self._group.lead(sample(logits, [sampler for _, sampler in jobs]))
        except Exception as error:
            failed = error
        if (failed := self._group.agree(failed)) is None:
            for (job, _), token in zip(jobs, tokens, strict=True):
                self.advance(job, token)
            return
        if len(jobs) == 1:
            self.fail(jobs[0][0], failed)
            return
        _log.warning("joint sampling failed", sessions=len(jobs), reason=type(failed).__name__)
        for row, one in enumerate(jobs):
            self._sample(logits[row : row + 1], [one])

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
                self.order.charge(job, passed)

    def _finish(self, job: Job, value: Any) -> None:
        self.active.remove(job)
        self.order.leave(job)
        self._engine.host_cache.unpin(job.session)
        self._measure(job.session)
        if isinstance(job.work, SlotWork):
            # Behind the job, not before it: the first token waits for the rows of the slot alone.
            self._engine.store.prefetch(job.session)
        if isinstance(value, pb.TurnDone):
            value.seconds["queued"] = job.queued_seconds
        if not self._group.lead(resolve(job.result, value)) and not job.read_only:
            # Cancelled in its last step: the session's new state will never be committed.
            self._discard_session(job)

    def _discard_session(self, job: Job, only_dirty: bool = False) -> None:
        session = self._engine.sessions.get(job.session)
        if session is not None and (session.dirty or not only_dirty):
            self._engine.discard(session)

    def _measure(self, name: str) -> None:
        """Record the end of a session's job: from now on it is idle."""
        session = self._engine.sessions.get(name)
        if session is not None:
            self.idle.use(name, time.monotonic())
            self.idle.measure(name, session.nbytes)
