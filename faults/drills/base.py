"""The form of a drill: one fault on a set-up of its own, and what must come of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from faults.findings import DRILLS, Findings
from faults.load.client import FaultClient
from faults.load.contest import Contest
from faults.load.counters import Counters
from faults.rig.setups import Rig, Setup
from faults.wake import ask_contested

FILLER = "The list says that the {thing} of {name} has code {code}. "


@dataclass
class Stage:
    """Folder, rig and undisturbed service of a drill, its findings, and its random choices."""

    folder: Path
    rig: Rig
    calm: Sequence[str]
    rng: Random
    findings: Findings = field(default_factory=Findings)
    counters: Counters = field(default_factory=Counters)

    @contextmanager
    def started(self, setup: Setup) -> Iterator[FaultClient]:
        """Run a set-up, with a client. Raises ServerNotReady."""
        client = FaultClient(setup.urls, self.counters, self.rng)
        try:
            setup.start()
            yield client
        finally:
            client.close()
            setup.close()

    def talk(self, client: FaultClient, turns: int = 2) -> Contest:
        """A new session with some turns."""
        contest = Contest(f"drill-{self.folder.name}-{self.rng.randrange(1 << 30)}", self.counters)
        contest.open(client)
        for _ in range(turns - 1):
            contest.say(client, self.words())
        return contest

    def words(self, sentences: int = 12) -> str:
        """Some hundred tokens that were not said before."""
        return "".join(
            FILLER.format(
                thing=self.rng.choice(("locker", "garage", "office")),
                name=self.rng.choice(("Ada", "Ben", "Clara")),
                code=self.rng.randrange(1000, 10000),
            )
            for _ in range(sentences)
        )

    def check(self, setup: Setup, client: FaultClient, contest: Contest) -> None:
        """Every acknowledged turn is in the log, and the replies are those of a replay of it."""
        ask_contested(setup, client, contest, self.calm, self.findings)

    def check_rows(self, setup: Setup, client: FaultClient, contest: Contest) -> None:
        """As `check`, where the fault has taken acknowledged turns: the log left is the truth."""
        ask_contested(setup, client, contest, self.calm, self.findings, may_lose=True)

    def expect(self, holds: object, text: str) -> None:
        """Count a failure unless `holds`."""
        if not holds:
            self.findings.fail(DRILLS, [text])


Drill = Callable[[Stage], None]
