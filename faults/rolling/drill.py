"""The drill: clients talk through a balancer while one step after the other is done."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from faults import findings as kinds
from faults.checks import answers
from faults.findings import Findings
from faults.load.client import FaultClient
from faults.load.counters import Counters
from faults.rig.processes import END_SECONDS, until
from faults.rig.setups import Rig, Setup, cluster
from faults.rolling.balancer import Balancer
from faults.rolling.outcome import Done, Outcome
from faults.rolling.steps import KINDS, Step, build_steps
from faults.rolling.talker import Talker
from faults.rolling.tally import Tally
from faults.undisturbed import undisturbed_service
from faults.wake import ask_contested


@dataclass(frozen=True)
class Plan:
    """Sizes of a drill.

    Attributes:
        seed: Of what clients say and when.
        clients: Number of clients.
        calm_seconds: Time under load before the first step, and between two steps.
        stopped_seconds: Time for which a process is stopped by SIGSTOP.
        kinds: Kinds of the steps that are done.
    """

    seed: int = 1
    clients: int = 4
    calm_seconds: float = 3.0
    stopped_seconds: float = 10.0
    kinds: Sequence[str] = KINDS


@dataclass
class Drill:
    """A drill on a cluster of its own in the folder `folder`."""

    folder: Path
    rig: Rig
    plan: Plan
    note: Callable[[str], None] = lambda _: None
    tally: Tally = field(default_factory=Tally)
    findings: Findings = field(default_factory=Findings)

    def run(self) -> Outcome:
        """Do all steps under load, then compare logs and answers. Raises ServerNotReady, TimeoutError."""
        setup = cluster(self.folder, self.rig)
        try:
            setup.start()
            with Balancer(setup.urls, self.tally) as balancer:
                talkers = self._hire(balancer)
                done = self._under_load(setup, talkers)
            self.note("comparing logs and answers")
            lost, doubled = self._check(setup, talkers)
            self.findings.fail(kinds.BAD_EXITS, setup.stop())
        finally:
            setup.close()
        self.findings.fail(kinds.WRONG_ERRORS, self.tally.unexpected())
        self.findings.fail(kinds.NOT_SERVED, self.tally.failures)
        turns = sum(len(each.acknowledged) for talker in talkers for each in talker.conversations)
        return Outcome(done, self.tally, turns, lost, doubled, self.findings)

    def _hire(self, balancer: Balancer) -> list[Talker]:
        return [
            Talker(f"client-{number}", balancer, self.tally, Random(f"{self.plan.seed} {number}"))
            for number in range(self.plan.clients)
        ]

    def _under_load(self, setup: Setup, talkers: Sequence[Talker]) -> list[Done]:
        over = threading.Event()
        threads = [threading.Thread(target=talker.run, args=(over,)) for talker in talkers]
        for thread in threads:
            thread.start()
        try:
            begin = time.monotonic()
            self._go_on()
            done = [Done("nothing", "all", begin, begin, time.monotonic())]
            steps = build_steps(setup, self.plan.stopped_seconds)
            return done + [self._do(step) for step in steps if step.kind in self.plan.kinds]
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _do(self, step: Step) -> Done:
        """Do a step; it ends when the process serves and every client had an answer since."""
        begin = time.monotonic()
        step.act()
        until(step.serves, f"{step.name}: it serves again")
        served = time.monotonic()
        self._go_on()
        done = Done(step.done, step.process, begin, served, time.monotonic())
        self.note(f"{step.name}: served again after {done.seconds:.1f} s")
        return done

    def _go_on(self) -> None:
        """Wait until every client has an answer to a request that it begins now."""
        now = time.monotonic()
        time.sleep(self.plan.calm_seconds)
        until(
            lambda: len(self.tally.clients_since(now)) == self.plan.clients or self.tally.failures,
            "every client is answered",
            END_SECONDS,
        )

    def _check(self, setup: Setup, talkers: Sequence[Talker]) -> tuple[list[str], list[str]]:
        """Compare logs and answers, those of all clients at once; returns what was lost and doubled."""
        with (
            undisturbed_service(self.folder / "undisturbed", self.rig, []) as calm,
            ThreadPoolExecutor(len(talkers)) as pool,
        ):
            found = list(
                pool.map(lambda talker: self._check_client(setup, calm.urls, talker), talkers)
            )
        lost = [text for texts, _ in found for text in texts]
        return lost, [text for _, texts in found for text in texts]

    def _check_client(
        self, setup: Setup, calm: Sequence[str], talker: Talker
    ) -> tuple[list[str], list[str]]:
        """Acknowledged turns that the catalog does not have, and turns that it has twice.

        Answers are compared with those of the undisturbed service, and the sessions are deleted.
        """
        client = FaultClient(setup.urls, Counters(), Random(talker.name))
        lost: list[str] = []
        doubled: list[str] = []
        try:
            for each in talker.conversations:
                if each.session:
                    log = answers.read_log(setup, each.session)
                    lost += each.lost_turns(log)
                    doubled += each.doubled_turns(log)
                ask_contested(setup, client, each, calm, self.findings)
        finally:
            client.close()
        return lost, doubled
