"""A round: a set-up of its own, several clients, faults meanwhile, and checks afterwards."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from benchmarks.faults import checks, logs
from benchmarks.faults.client import Counters, FaultClient, NotServedError, Transcript
from benchmarks.faults.injector import Injector
from benchmarks.faults.scripts import Script
from benchmarks.faults.setups import Setup
from kvrecall.app.errors import ServerNotReady

CLIENTS = 3
LOST_TURNS = "turns lost or twice"
CHANGED = "answers that changed"
NOT_SERVED = "not served"
DIFFERENT = "answers that differ"
AFTER_REBUILD = "answers that differ, after lost pages were computed again"
# Share of the sessions that stay, through all faults, to the end of the round.
KEPT_SHARE = 0.3


@dataclass
class Findings:
    """Results of a round. Every list in `failures` should be empty.

    `other_rows` are answers with the same text though other rows were active.
    """

    faults: Counter[str]
    counters: Counters
    failures: dict[str, list[str]]
    other_rows: list[str]
    refused_starts: int
    rebuilt_pages: int
    events: Counter[str]


@dataclass
class Round:
    """One set-up under faults. `undisturbed` are the expected transcripts by script number."""

    setup: Setup
    scripts: Sequence[Script]
    undisturbed: Mapping[int, Transcript]
    seed: str
    counters: Counters = field(default_factory=Counters)
    failures: dict[str, list[str]] = field(default_factory=dict)
    differences: list[checks.Difference] = field(default_factory=list)
    kept: list[Transcript] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, weights: Mapping[str, float], faults: int) -> Findings:
        """Start the set-up, inject the faults under load, and check the rest."""
        injector = Injector(self.setup, weights, self.seed)
        try:
            self.setup.start()
            self._under_load(lambda: injector.run(faults))
            self._check_afterwards()
        except ServerNotReady as error:
            self._add_failures("did not start", [str(error)])
        finally:
            self.setup.close()
        self._add_failures("stray processes", checks.find_stray_processes(self.setup))
        self._add_failures("torn streams", self.counters.torn_streams)
        return self._build_findings(injector.happened)

    def _build_findings(self, happened: Counter[str]) -> Findings:
        rebuilt = logs.rebuilt(self.setup)
        for difference in (each for each in self.differences if each.in_text):
            sessions = difference.transcript.sessions.values()
            kind = AFTER_REBUILD if any(session in rebuilt for session in sessions) else DIFFERENT
            self._add_failures(kind, [difference.text])
        return Findings(
            happened,
            self.counters,
            self.failures,
            [each.text for each in self.differences if not each.in_text],
            sum(server.refused_starts for server in self.setup.servers),
            rebuilt.total(),
            logs.events(self.setup),
        )

    def _under_load(self, inject: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=self._run_client, args=(number,)) for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            inject()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _run_client(self, number: int) -> None:
        """Run script after script until the faults are over; the last one to its end."""
        rng = Random(f"{self.seed} speaker {number}")
        client = FaultClient(self.setup.urls, self.counters, rng)
        try:
            while not self._over.is_set():
                number = next(self._numbers)
                script = self.scripts[number % len(self.scripts)]
                transcript = Transcript(script, f"{self.seed}-{number}")
                try:
                    self._run_script(client, transcript, rng)
                except NotServedError as error:
                    self._add_failures(NOT_SERVED, [f"{transcript.name}: {error}"])
                    self.kept.append(transcript)
        finally:
            client.close()

    def _run_script(self, client: FaultClient, transcript: Transcript, rng: Random) -> None:
        script = transcript.script
        client.run(transcript)
        self.differences += checks.find_differences(transcript, self.undisturbed[script.number])
        again = [rng.randrange(len(script.steps))]
        self._add_failures(CHANGED, checks.find_changed_answers(client, transcript, again))
        self._add_failures(LOST_TURNS, checks.find_log_errors(self.setup, transcript))
        if rng.random() < KEPT_SHARE:
            self.kept.append(transcript)
        else:
            client.delete_sessions(transcript)

    def _check_afterwards(self) -> None:
        """Ask again for all answers of kept sessions and delete them; nothing may be left."""
        client = FaultClient(self.setup.urls, self.counters, Random(self.seed))
        for transcript in self.kept:
            try:
                self._add_failures(LOST_TURNS, checks.find_log_errors(self.setup, transcript))
                steps = range(len(transcript.answers))
                changed = checks.find_changed_answers(client, transcript, steps)
                self._add_failures(CHANGED, changed)
                client.delete_sessions(transcript)
            except NotServedError as error:
                self._add_failures(NOT_SERVED, [f"{transcript.name}: {error}"])
        client.close()
        self._add_failures("held without a session", checks.find_leaks_in_service(self.setup))
        self._add_failures("bad exits", self.setup.stop())
        self._add_failures("pages and files left", checks.find_leaks_in_storage(self.setup))
        self._add_failures("fsck", checks.run_fsck(self.setup))

    def _add_failures(self, kind: str, texts: Sequence[str]) -> None:
        with self._lock:
            self.failures.setdefault(kind, []).extend(texts)


def record_undisturbed(setup: Setup, scripts: Sequence[Script]) -> dict[int, Transcript]:
    """Transcripts of all scripts, by their number, in a service without faults."""
    client = FaultClient(setup.urls, Counters(), Random(0))
    try:
        setup.start()
        transcripts = {
            script.number: Transcript(script, f"calm-{script.number}") for script in scripts
        }
        for transcript in transcripts.values():
            client.run(transcript)
        return transcripts
    finally:
        client.close()
        setup.close()


def create_folder(root: Path, name: str) -> Path:
    """A new folder of a round."""
    folder = root / name
    folder.mkdir(parents=True)
    return folder
