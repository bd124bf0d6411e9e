"""A rank that follows: it carries out rank 0's decisions, on its own heads, rows and store."""

from concurrent.futures import CancelledError

import structlog

from workers.engine.engine import Engine
from workers.errors import Cancelled
from workers.parallel.decision import Decision
from workers.scheduler.calls import Calls
from workers.scheduler.job import Job
from workers.scheduler.job_runner import JobRunner
from workers.scheduler.requests import rebuild_job

_log = structlog.get_logger(__name__)


class Follower:
    """Jobs and sessions of a rank other than 0, as rank 0's scheduler decides.

    It has no queue and no clock of its own: where rank 0 went on because something was done, this rank
    waits for its own to be done. What its jobs return is nobody's: rank 0 answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = JobRunner(engine)
        self._calls = Calls(engine, self._runner)

    def run(self) -> None:
        """Carry out decisions until rank 0 closes the worker. Raises GroupLost."""
        self._engine.group.meet()
        while (decision := self._engine.group.lead(Decision("nothing"))).action != "close":
            self._take(decision)
        self._engine.close()

    def _take(self, decision: Decision) -> None:
        match decision.action:
            case "enter":
                [number] = decision.jobs
                self._runner.enter(rebuild_job(self._engine, decision.request, number))
            case "start":
                self._runner.start(*self._find(decision))
            case "advance":
                self._runner.advance_next(*self._find(decision))
            case "decode":
                self._runner.decode(self._find(decision))
            case "fail":
                for job in self._find(decision):
                    self._runner.fail(job, Cancelled("cancelled by rank 0"))
            case "preempt":
                self._runner.preempt(*self._find(decision))
            case "fetch":
                self._runner.fetch(decision.session)
            case "swap out":
                self._runner.swap_out(decision.session)
            case "unload":
                self._runner.idle.forget(decision.session)  # rank 0 has taken it out as due
                self._engine.unload(decision.session)
            case "call":
                self._call(decision)

    def _find(self, decision: Decision) -> list[Job]:
        """Find the jobs of a decision, in its order."""
        jobs = {job.number: job for job in self._runner.jobs}
        return [jobs[number] for number in decision.jobs]

    def _call(self, decision: Decision) -> None:
        name, arguments = decision.call
        try:
            self._calls.find(name)(*arguments)
        except (Exception, CancelledError) as error:  # rank 0's caller learns of its own
            _log.debug("call failed", call=name, reason=type(error).__name__)
