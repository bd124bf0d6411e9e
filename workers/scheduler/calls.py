"""Calls of a scheduler's thread between two steps, which all ranks of a worker run."""

from collections.abc import Callable
from concurrent.futures import Future

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.scheduler.job_runner import JobRunner


class Calls:
    """What is asked of a worker beside jobs, by name. Only the scheduler's thread calls it."""

    def __init__(self, engine: Engine, runner: JobRunner) -> None:
        self._engine = engine
        self._runner = runner

    def find(self, name: str) -> Callable[..., object]:
        """Find the call of a decision."""
        calls: dict[str, Callable[..., object]] = {
            "stop_early": self.stop_early,
            "release": self.release,
            "delete": self.delete,
            "memory": self.memory,
        }
        return calls[name]

    def stop_early(self, session: str) -> None:
        """Ask a session's jobs to stop early."""
        self._runner.request_stop(session)

    def release(self, session: str, epoch: int) -> "Future[None]":
        """Release a session that moved to another worker, unless it was opened later."""
        known = self._engine.sessions.get(session)
        if known is not None and known.config.epoch <= epoch:
            self._runner.forget(session)
        return self._engine.release(session, epoch)

    def delete(self, session: str) -> "Future[None]":
        """Close a session that was deleted, with its running jobs."""
        self._runner.forget(session)
        return self._engine.unload(session)

    def memory(self, session: str) -> pb.MemoryReport:
        """Report a session's rows and bytes. Raises UnknownSession."""
        return self._engine.memory(self._engine.session(session))
