"""What the scheduler's decisions do to jobs and sessions; every rank of a worker takes the same ones."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from kvrecall.domain.phases import Phase
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from kvrecall.telemetry.stopwatch import record_phase
from workers.engine.engine import Engine
from workers.errors import Cancelled, WorkerError
from workers.generation.sampling import sample
from workers.generation.steps import Decode, Steps, Yielded
from workers.scheduler.fair_order import FairOrder
from workers.scheduler.idle import IdleSessions
from workers.scheduler.job import CommonWork, Job, SlotWork, StoreWork, resolve

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Finished:
    """End of a job, with its result."""

    value: Any


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
        [failed] = self._group.end([failed])
        if failed is not None:
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
            job.context.run(record_phase, Phase.QUEUED, job.submitted, began)
        self.active.append(job)

    def advance(self, steps: Sequence[tuple[Job, int | None]]) -> None:
        """Take the next steps of jobs; with each the token that it waits for, if it decodes."""
        outcomes = [self._take_step(job, sampled) for job, sampled in steps]
        errors = self._group.end(
            [each if isinstance(each, Exception) else None for each in outcomes]
        )
        for (job, _), outcome, error in zip(steps, outcomes, errors, strict=True):
            if error is not None:
                self.fail(job, error)
            elif isinstance(outcome, _Finished):
                self._finish(job, outcome.value)
            elif isinstance(outcome, Future):
                job.waiting = outcome
                job.waiting_since = time.monotonic()
            elif isinstance(outcome, Decode):
                job.decoding = outcome

    def advance_next(self, job: Job) -> None:
        """Take a step of a job that does not decode: jobs alternate."""
        self.active.remove(job)
        self.active.append(job)
        if job.waiting is not None:
            wait([job.waiting])  # on rank 0 it is done
            job.waiting = None
        with self.count_seconds(kind=job.kind):
            self.advance([(job, None)])

    def decode(self, jobs: list[Job]) -> None:
        """Append a token to sessions that decode, and sample the next, in one batch.

        If the pass fails, each session gets one of its own: an error ends only those jobs whose own pass
        raises it.
        """
        with self.count_seconds(kind="decode"):
            self._decode([(job, job.decoding) for job in jobs if job.decoding is not None])

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
        if isinstance(job.work, CommonWork):
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

    def _decode(self, jobs: list[tuple[Job, Decode]]) -> None:
        """Append the jobs' tokens in one pass, or each in its own if that fails, and go on with them."""
        logits, tokens, failed = None, list[int](), None
        try:
            jobs, logits = self._forward(jobs)
            tokens = self._sample(logits, jobs)
        except Exception as error:  # a failed pass must end its turns, not the worker
            failed = error
        if failed is None:
            self._go_on(jobs, tokens)
            return
        [failed] = self._group.end([failed])
        # Those that have appended their tokens do not append them again.
        appended = self._group.gather(logits is not None)
        assert failed is not None, "a step ends early where it has failed on some rank"
        if len(jobs) == 1 or len(set(appended)) > 1:
            for job, _ in jobs:
                self.fail(job, failed)
            return
        what = "forward pass" if logits is None else "sampling"
        _log.warning(f"joint {what} failed", sessions=len(jobs), reason=type(failed).__name__)
        del failed  # its traceback holds the memory of the failed pass
        for row, each in enumerate(jobs):
            if logits is None:
                self._decode([each])
            else:
                self._sample_again(logits[row : row + 1], each)

    def _forward(self, jobs: list[tuple[Job, Decode]]) -> tuple[list[tuple[Job, Decode]], Tensor]:
        """Append the jobs' tokens in one forward pass.

        Returns the jobs in the order of their slots: neighbours are read without a copy. And their
        logits, float32 `[B, vocabulary]`. After an exception no token was appended.
        """
        began = time.perf_counter()
        batch = [(self._engine.resident(job.session), job, decoding) for job, decoding in jobs]
        batch.sort(key=lambda entry: entry[0].slot)
        tokens = torch.tensor([[decoding.token] for _, _, decoding in batch])
        logits = self._engine.forward([resident for resident, _, _ in batch], tokens)[:, -1]
        for _, job, _ in batch:
            self._engine.usage.recount(job.session, "decoded", 1)
        self._metrics.observe("worker_step_seconds", time.perf_counter() - began, kind="decode")
        self._metrics.observe("worker_batch_sessions", len(batch))
        self.order.charge_decoding([job for _, job, _ in batch])
        return [(job, decoding) for _, job, decoding in batch], logits

    def _sample(self, logits: Tensor, jobs: list[tuple[Job, Decode]]) -> list[int]:
        """Sample the next tokens; those of rank 0."""
        return self._group.lead(sample(logits, [decoding.sampler for _, decoding in jobs]))

    def _sample_again(self, logits: Tensor, job: tuple[Job, Decode]) -> None:
        """Sample one job's next token, whose token before is appended; an error ends it alone."""
        tokens, failed = list[int](), None
        try:
            tokens = self._sample(logits, [job])
        except Exception as error:
            failed = error
        [failed] = self._group.end([failed])
        if failed is None:
            self._go_on([job], tokens)
        else:
            self.fail(job[0], failed)

    def _go_on(self, jobs: list[tuple[Job, Decode]], tokens: list[int]) -> None:
        self.advance([(job, token) for (job, _), token in zip(jobs, tokens, strict=True)])

    def _take_step(self, job: Job, sampled: int | None) -> "_Finished | Exception | Yielded":
        """Take a job's next step, and charge it.

        Returns what it waits for, its value if it has finished, or its error, which ends it alone.
        """
        assert job.running is not None, "only a started job advances"
        job.decoding = None
        self._group.next_step()
        passed = self._engine.passed_tokens
        try:
            # A generator that has not started, or waits for nothing, is sent None.
            return job.context.run(job.running.send, sampled)  # type: ignore[arg-type]
        except StopIteration as ended:
            return _Finished(ended.value)
        except Exception as error:
            return error
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
            _add_queue(value, job.queued_seconds)
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


def _add_queue(done: pb.TurnDone, seconds: float) -> None:
    """Put the time in the queue before the phases that a turn reports of itself."""
    for phase, start in list(done.phase_starts.items()):
        done.phase_starts[phase] = start + seconds
    done.seconds[Phase.QUEUED] = seconds
    done.phase_starts[Phase.QUEUED] = 0.0
