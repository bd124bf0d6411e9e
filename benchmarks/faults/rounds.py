"""A round: a set-up of its own, several clients that speak to it, faults meanwhile, and checks when all is quiet."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from benchmarks.faults import checks, logs
from benchmarks.faults.injecting import Injector
from benchmarks.faults.scripts import Script
from benchmarks.faults.setups import Setup
from benchmarks.faults.speaking import FaultClient, NotServedError, Tally, Told
from kvrecall.app.errors import ServerNotReady

SPEAKERS = 3
DIFFERENT = "answers that differ"
AFTER_REBUILD = "answers that differ, after lost pages were computed again"
KEPT_SHARE = 0.3
"""Of the sessions: they stay, through whatever happens, to the end of the round."""


@dataclass
class Findings:
    """What a round came to; everything under `wrong` should be empty."""

    faults: Counter[str]
    tally: Tally
    wrong: dict[str, list[str]]
    other_rows: list[str]
    """Answers that are alike, though other rows were held."""
    refused_starts: int
    rebuilt_pages: int
    events: Counter[str]


@dataclass
class Round:
    """One set-up under faults."""

    setup: Setup
    scripts: Sequence[Script]
    calm: Mapping[int, Told]
    seed: str
    tally: Tally = field(default_factory=Tally)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    differences: list[checks.Difference] = field(default_factory=list)
    kept: list[Told] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, weights: Mapping[str, float], faults: int) -> Findings:
        """Start everything, let the faults happen under load, and check what is left."""
        injector = Injector(self.setup, weights, self.seed)
        try:
            self.setup.start()
            self._under_load(lambda: injector.run(faults))
            self._check_in_peace()
        except ServerNotReady as error:
            self._note("did not start", [str(error)])
        finally:
            self.setup.close()
        self._note("stray processes", checks.strays(self.setup))
        self._note("torn streams", self.tally.torn_streams)
        return self._findings(injector.happened)

    def _findings(self, happened: Counter[str]) -> Findings:
        rebuilt = logs.rebuilt(self.setup)
        for difference in (each for each in self.differences if each.in_words):
            again = any(session in rebuilt for session in difference.told.sessions.values())
            self._note(AFTER_REBUILD if again else DIFFERENT, [difference.text])
        return Findings(
            happened,
            self.tally,
            self.wrong,
            [each.text for each in self.differences if not each.in_words],
            sum(server.refused_starts for server in self.setup.servers),
            rebuilt.total(),
            logs.events(self.setup),
        )

    def _under_load(self, during: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=self._speak, args=(number,)) for number in range(SPEAKERS)
        ]
        for thread in threads:
            thread.start()
        try:
            during()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _speak(self, number: int) -> None:
        """Tell script after script until the faults are over; the last one to its end."""
        rng = Random(f"{self.seed} speaker {number}")
        speaker = FaultClient(self.setup.urls, self.tally, rng)
        try:
            while not self._over.is_set():
                number = next(self._numbers)
                told = Told(self.scripts[number % len(self.scripts)], f"{self.seed}-{number}")
                try:
                    self._tell_one(speaker, told, rng)
                except NotServedError as error:
                    self._note("not served", [f"{told.name}: {error}"])
                    self.kept.append(told)
        finally:
            speaker.close()

    def _tell_one(self, speaker: FaultClient, told: Told, rng: Random) -> None:
        script = told.script
        speaker.tell(told)
        self.differences += checks.differences(told, self.calm[script.number])
        again = rng.randrange(len(script.steps))
        self._note("answers that changed", checks.changed_when_asked_again(speaker, told, [again]))
        self._note("turns lost or twice", checks.missing_from_log(self.setup, told))
        if rng.random() < KEPT_SHARE:
            self.kept.append(told)
        else:
            speaker.forget(told)

    def _check_in_peace(self) -> None:
        """What stayed is asked for again, then deleted; nothing may be left."""
        speaker = FaultClient(self.setup.urls, self.tally, Random(self.seed))
        for told in self.kept:
            try:
                self._note("turns lost or twice", checks.missing_from_log(self.setup, told))
                everything = range(len(told.answers))
                self._note(
                    "answers that changed",
                    checks.changed_when_asked_again(speaker, told, everything),
                )
                speaker.forget(told)
            except NotServedError as error:
                self._note("not served", [f"{told.name}: {error}"])
        speaker.close()
        self._note("held without a session", checks.leaks_in_service(self.setup))
        self._note("bad exits", self.setup.stop())
        self._note("pages and files left", checks.leaks_in_storage(self.setup))
        self._note("fsck", checks.found_by_fsck(self.setup))

    def _note(self, what: str, found: Sequence[str]) -> None:
        with self._lock:
            self.wrong.setdefault(what, []).extend(found)


def undisturbed(setup: Setup, scripts: Sequence[Script]) -> dict[int, Told]:
    """Every script as a service tells it to which nothing happens."""
    speaker = FaultClient(setup.urls, Tally(), Random(0))
    try:
        setup.start()
        calm = {script.number: Told(script, f"calm-{script.number}") for script in scripts}
        for told in calm.values():
            speaker.tell(told)
        return calm
    finally:
        speaker.close()
        setup.close()


def folder_of(root: Path, name: str) -> Path:
    """A new folder of a round."""
    folder = root / name
    folder.mkdir(parents=True)
    return folder
