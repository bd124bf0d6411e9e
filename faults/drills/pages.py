"""Drills on pages that sessions share, that are deleted under a turn, or that no commit names yet."""

import sqlite3
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread

from faults.checks import events
from faults.drills import late_commit
from faults.drills.base import Stage
from faults.load.contest import Contest
from faults.rig import clock
from faults.rig.metrics import read_metrics
from faults.rig.processes import until
from faults.rig.setups import SWEEP_SECONDS, Setup, embedded, files_only
from kvrecall.client import KvrecallClient, TextDelta

# The turn under which something happens: long enough for it.
ANSWER_TOKENS = 400
PATIENCE_SECONDS = 120.0


def repeat_text(stage: Stage) -> None:
    """Pages of the same tokens in one session, each behind others: each has its own rows."""
    setup = embedded(stage.folder, stage.rig)
    with stage.started(setup) as client:
        contest = stage.talk(client)
        contest.say(client, "again " * 400)
        setup.stop()
        setup.start()  # its rows are in files alone now
        contest.say(client, stage.words(4))
        stage.check(setup, client, contest)


def delete_under_a_turn(stage: Stage) -> None:
    """A first turn has found a session's pages when that is deleted: the turn keeps them."""
    setup = embedded(stage.folder, stage.rig)
    with stage.started(setup) as client:
        beginning = stage.words(30)
        first, second = (
            Contest(f"drill-{name}-{stage.rng.random()}", stage.counters) for name in "ab"
        )
        for contest in (first, second):
            contest.session = client.retry(contest.create)["id"]
        first.say(client, beginning)
        turn = _Turn(setup.urls[0], second, beginning)
        turn.begin()
        client.delete(first.session, f"{first.name}-delete")
        until(lambda: not _count_dead(setup), "dead pages are deleted", PATIENCE_SECONDS)
        turn.end(stage)
        setup.stop()
        setup.start()  # its rows are in files alone now
        second.say(client, stage.words(4))
        _expect_no_loss(stage, setup)
        client.delete(second.session, f"{second.name}-delete")


def restart_before_commit(stage: Stage) -> None:
    """A worker is restarted, and swept, between the end of a turn and its commit: it keeps the pages."""
    setup = files_only(stage.folder, stage.rig)
    (gateway,) = setup.gateways
    commit = stage.folder / "commit"
    gateway.environment = {
        **gateway.environment,
        clock.PATCH: late_commit.__name__,
        late_commit.WHEN: str(commit),
    }
    with stage.started(setup) as client:
        worker, other = setup.workers
        other.stop()  # it has no rows of the session
        contest = stage.talk(client)
        turn = _Turn(setup.urls[0], contest, f"{late_commit.LATE}: {stage.words(20)}")
        turn.begin()
        until(lambda: _is_idle(setup.operations[0]), "the turn is done", PATIENCE_SECONDS)
        worker.kill()
        worker.start()
        until(lambda: _has_worker(setup), "the worker is back", PATIENCE_SECONDS)
        time.sleep(SWEEP_SECONDS)  # the gateway sweeps it at its return, and again after this time
        commit.touch()
        turn.end(stage)
        contest.say(client, stage.words(4))
        _expect_no_loss(stage, setup)
        client.delete(contest.session, f"{contest.name}-delete")


def _has_worker(setup: Setup) -> bool:
    """Whether the gateway reaches a worker."""
    with KvrecallClient(setup.urls[0], PATIENCE_SECONDS) as client:
        return any(load.stats is not None for load in client.workers())


class _Turn:
    """A long turn of a session, sent once, on a thread of its own."""

    def __init__(self, url: str, contest: Contest, text: str) -> None:
        self._url = url
        self._contest = contest
        self._text = text
        self._begun = Event()
        self._failure = ""
        self._thread = Thread(target=self._run)

    def begin(self) -> None:
        """Begin, and wait for the answer's first words. Raises TimeoutError."""
        self._thread.start()
        until(self._begun.is_set, "the turn has begun", PATIENCE_SECONDS)

    def end(self, stage: Stage) -> None:
        """Wait for the end, which is to be a good one."""
        self._thread.join()
        stage.expect(not self._failure, f"the turn failed: {self._failure}")

    def _run(self) -> None:
        messages = self._contest.messages(self._text)
        try:
            with (
                KvrecallClient(self._url, PATIENCE_SECONDS) as client,
                client.stream(self._contest.session, messages, max_tokens=ANSWER_TOKENS) as stream,
            ):
                for event in stream:
                    if isinstance(event, TextDelta):
                        self._begun.set()
                self._contest.acknowledged[self._text] = asdict(stream.read())
        except Exception as error:
            self._failure = repr(error)
            self._begun.set()


def _expect_no_loss(stage: Stage, setup: Setup) -> None:
    lost = events.rebuilt(setup)
    stage.expect(not +lost, f"pages were lost: {dict(lost)}")


def _count_dead(setup: Setup) -> int:
    path = f"{_get_catalog(setup).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(path, uri=True)) as catalog:
        (count,) = catalog.execute("SELECT count(*) FROM dead_pages").fetchone()
        return int(count)


def _get_catalog(setup: Setup) -> Path:
    return setup.catalog.data / "catalog.sqlite3"


def _is_idle(url: str) -> bool:
    """Whether a worker has no job."""
    return read_metrics(url).get("kvrecall_worker_jobs") == 0
