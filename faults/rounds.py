"""A round: a set-up of its own, several clients, faults meanwhile, and checks afterwards."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from random import Random

from faults import findings as kinds
from faults.checks import answers, events, fsck, latency, leaks
from faults.findings import Findings
from faults.kinds.injector import Injector
from faults.load.client import FaultClient, NotServedError
from faults.load.contest import Contest
from faults.load.counters import Counters
from faults.load.scripts import Script
from faults.load.talks import TENANT, Talk
from faults.load.transcript import Transcript
from faults.rig.setups import Setup
from faults.undisturbed import Undisturbed
from faults.wake import ask_contested, ask_slept, delete_talks, go_on
from kvrecall_server.app.errors import ServerNotReady

CLIENTS = 3
# Share of the sessions that stay, through all faults, to the end of the round.
KEPT_SHARE = 0.3
# After the last fault no request fails any more: a lease expires and a worker is found within it.
RECOVERY_SECONDS = 30.0


@dataclass
class Round:
    """One set-up under faults.

    `sound`: no fault touches durable rows, so that none may have to be computed again.
    """

    setup: Setup
    scripts: Sequence[Script]
    undisturbed: Undisturbed
    seed: str
    sound: bool = False
    counters: Counters = field(default_factory=Counters)
    findings: Findings = field(default_factory=Findings)
    differences: list[answers.Difference] = field(default_factory=list)
    kept: list[Transcript] = field(default_factory=list)
    contests: list[Contest] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, weights: Mapping[str, float], faults: int) -> Findings:
        """Start the set-up, inject the faults under load, and check the rest."""
        injector = Injector(self.setup, weights, self.seed, lambda: self.counters.answered)
        prober = latency.Prober(self.setup)
        try:
            self.setup.start()
            prober.start()
            self._under_load(lambda: injector.run(faults))
            self._check_afterwards()
        except ServerNotReady as error:
            self._fail(kinds.NOT_STARTED, [str(error)])
        finally:
            prober.stop()
            self.setup.close()
        self._check_latency(prober.samples())
        self._fail(kinds.STRAY, leaks.find_stray_processes(self.setup))
        self._count(injector.happened)
        return self.findings

    def _under_load(self, inject: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=self._run_client, args=(number,)) for number in range(CLIENTS)
        ]
        threads.append(threading.Thread(target=self._run_contests))
        threads.append(threading.Thread(target=self._run_talks))
        for thread in threads:
            thread.start()
        try:
            inject()
            self.setup.start()
            self.counters.calm_since = time.monotonic() + RECOVERY_SECONDS
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
                    self._fail(kinds.NOT_SERVED, [f"{transcript.name}: {error}"])
        finally:
            client.close()

    def _run_script(self, client: FaultClient, transcript: Transcript, rng: Random) -> None:
        script = transcript.script
        client.run(transcript, script.sleeps_at)
        if not transcript.voided:
            calm = self.undisturbed.transcripts[script.number]
            self.differences += answers.find_differences(transcript, calm)
        again = [rng.randrange(len(transcript.answers))]
        self._fail(kinds.CHANGED, answers.find_changed_answers(client, transcript, again))
        self._fail(kinds.LOST_TURNS, answers.find_log_errors(self.setup, transcript))
        if rng.random() < KEPT_SHARE and not transcript.voided:
            self.kept.append(transcript)
        else:
            client.delete_sessions(transcript)

    def _run_contests(self) -> None:
        """One contended session after the other."""
        while not self._over.is_set():
            contest = Contest(f"{self.seed}-contest-{len(self.contests)}", self.counters)
            self.contests.append(contest)
            try:
                contest.run(self.setup.urls, self._over)
            except NotServedError as error:
                contest.failures.append(f"{contest.name}: {error}")

    def _run_talks(self) -> None:
        """One talk after the other; some of them sleep through the faults that follow."""
        rng = Random(f"{self.seed} talker")
        client = FaultClient(self.setup.urls, self.counters, rng, tenant=TENANT)
        try:
            for number, calm in enumerate(cycle(self.undisturbed.talks.values())):
                if self._over.is_set():
                    return
                talk = Talk(calm.script, f"{self.seed}-talk-{number}")
                found = go_on(self.setup, client, talk, calm, talk.script.sleeps_at)
                with self._lock:
                    self.findings.add(found)
                if found.clean and rng.random() < KEPT_SHARE:
                    self.talks.append(talk)
                elif found.clean:
                    talk.delete(client)
        except NotServedError as error:
            self._fail(kinds.NOT_SERVED, [f"a talk: {error}"])
        finally:
            client.close()

    def _check_afterwards(self) -> None:
        """Use again what slept, delete it, and look for what is left.

        fsck looks before, while there is something to check, and after.
        """
        self._fail(kinds.BAD_EXITS, self.setup.stop())
        self._fail(kinds.FSCK_BEFORE, fsck.run_fsck(self.setup, damaged=True))
        pages = leaks.read_page_ids(self.setup)
        self.setup.start()
        self.counters.calm_since = time.monotonic() + RECOVERY_SECONDS
        client = FaultClient(self.setup.urls, self.counters, Random(self.seed))
        try:
            for transcript in self.kept:
                calm = self.undisturbed.transcripts[transcript.script.number]
                ask_slept(self.setup, client, transcript, calm, self.findings)
            for contest in self.contests:
                ask_contested(self.setup, client, contest, self.undisturbed.urls, self.findings)
        finally:
            client.close()
        self._check_talks()
        self._fail(kinds.HELD, leaks.find_leaks_in_service(self.setup))
        self._fail(kinds.BAD_EXITS, self.setup.stop())
        self._fail(kinds.LEFT, leaks.find_leaks_in_storage(self.setup, pages))
        self._fail(kinds.FSCK_AFTER, fsck.run_fsck(self.setup))

    def _check_talks(self) -> None:
        """Go on with the talks that slept, and delete all that talks left."""
        client = FaultClient(self.setup.urls, self.counters, Random(self.seed), tenant=TENANT)
        try:
            for talk in self.talks:
                calm = self.undisturbed.talks[talk.script.number]
                self.findings.add(go_on(self.setup, client, talk, calm))
                talk.delete(client)
            delete_talks(client)
        except NotServedError as error:
            self._fail(kinds.NOT_SERVED, [f"talks: {error}"])
        finally:
            client.close()

    def _check_latency(self, samples: Sequence[latency.Sample]) -> None:
        self._fail(kinds.SLOW_HEALTH, latency.slow_health_checks(self.setup, samples))
        slow = latency.slow_requests(self.setup, samples, self.counters.slow)
        self._fail(kinds.SLOW_REQUESTS, slow)

    def _count(self, happened: Counter[str]) -> None:
        found, counters = self.findings, self.counters
        rebuilt = events.rebuilt(self.setup)
        for difference in (each for each in self.differences if each.in_text):
            sessions = difference.transcript.sessions.values()
            was_rebuilt = any(session in rebuilt for session in sessions)
            kind = kinds.AFTER_REBUILD if was_rebuilt else kinds.DIFFERENT
            self._fail(kind, [difference.text])
        if self.sound:
            lost = events.rebuilt_without_cause(self.setup)
            self._fail(
                kinds.LOST_ROWS, [f"{pages} pages or states of {id}" for id, pages in lost.items()]
            )
        self._fail(kinds.TORN, counters.torn_streams)
        self._fail(kinds.WRONG_ERRORS, counters.wrong_errors)
        self._fail(kinds.LATE_ERRORS, counters.late_errors)
        found.count(kinds.FAULTS, happened)
        found.count("acknowledged", counters.acknowledged)
        found.count("acknowledged", Counter({"turns not yet durable": counters.not_durable}))
        found.count("clients", counters.other)
        found.count("tried again after", counters.retries)
        found.count("tried again after a server's error", counters.server_errors)
        found.count("service", events.events(self.setup))
        refused = sum(server.refused_starts for server in self.setup.servers)
        others = sum(not each.in_text for each in self.differences)
        found.count("service", Counter({"starts refused, tried again": refused}))
        found.count("service", Counter({"lost pages computed again": rebuilt.total()}))
        found.count("differences", Counter({"answers alike, other rows held": others}))
        slow = Counter(f"{each.outcome}" for each in counters.slow)
        found.count("requests over 5 seconds", slow)

    def _fail(self, kind: str, texts: Iterable[str]) -> None:
        with self._lock:
            self.findings.fail(kind, texts)
