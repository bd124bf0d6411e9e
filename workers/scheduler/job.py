"""The scheduler's jobs: a generator with its session, and the future of its result."""

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from google.protobuf.message import Message

from kvrecall.domain.fairness.share import Share
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.session import ResidentSession, WorkerSession
from workers.generation.steps import Decode, Steps


@dataclass(frozen=True)
class SlotWork:
    """Work that starts once its session has a slot."""

    steps: Callable[[ResidentSession], Steps[Any]]


@dataclass(frozen=True)
class StoreWork:
    """Work on the session's stored rows alone, which needs no slot."""

    steps: Callable[[WorkerSession], Steps[Any]]


@dataclass(frozen=True)
class CommonWork:
    """Work for all sessions, on the model or on what is stored; its job names none, and is never refused."""

    steps: Callable[[], Steps[Any]]


JobKind = Literal["turn", "repair", "settle", "ahead", "build", "open", "measure", "pages"]
JobState = Literal["running", "queued"]


@dataclass(eq=False)
class Job:
    """One turn, repair, settling, build, open, fork, rebuild, measurement, list or deletion of pages.

    - `kind`: for the metrics; a fork and a rebuild open a session.
    - `read_only`: after its end the session is as before, also if its result was cancelled.
    - `opening`: settings and state of the empty session that it restores, which is open only after its end.
    - `request`: the message that it was built from, see `workers.scheduler.requests`; None for a measurement.
    - `number`: among all jobs of the worker; the same on its ranks.
    - `stop_requested`: a repair stops early, with the best rows found so far; prefill ahead, behind a block.
    - `decoding`: the token to append for it in the next batch, and its sampler.
    - `waiting`: the future that it waits for, since `waiting_since`.
    - `share`: of the scheduler's steps.
    - `context`: that of its caller, by which its log lines and spans belong to the caller's request.
    """

    kind: JobKind
    session: str
    epoch: int
    work: SlotWork | StoreWork | CommonWork
    read_only: bool = False
    opening: tuple[pb.SessionSpec, pb.SessionState] | None = None
    request: Message | None = None
    number: int = 0
    stop_requested: bool = False
    result: "Future[Any]" = field(default_factory=Future)
    running: Steps[Any] | None = None
    decoding: Decode | None = None
    waiting: "Future[Any] | None" = None
    waiting_since: float = 0.0
    share: Share = field(default_factory=Share)
    submitted: float = field(default_factory=time.perf_counter)
    queued_seconds: float = 0.0
    context: Context = field(default_factory=copy_context)

    @property
    def opens(self) -> bool:
        """True if it opens its session."""
        return self.opening is not None

    def hurry(self) -> None:
        """End early, before other work: a turn waits for it."""
        self.stop_requested = True
        self.share = replace(self.share, background=False)


def resolve(result: "Future[Any]", outcome: Any) -> bool:
    """Set a job's result or error; False if its caller has cancelled it, as it may at any time."""
    try:
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)
    except InvalidStateError:
        # `concurrent.futures.wait` learns of the cancellation only by this call.
        result.set_running_or_notify_cancel()
        return False
    return True
