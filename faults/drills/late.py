"""Drills on writes that arrive late: after another process has taken the session over."""

import time
from contextlib import suppress
from dataclasses import asdict
from threading import Thread

from faults.checks.answers import read_log
from faults.checks.leaks import LEAK_SECONDS, find_lasting, read_page_ids
from faults.drills.base import Stage
from faults.load.client import FaultClient
from faults.load.contest import Contest
from faults.rig.processes import until
from faults.rig.setups import cluster
from kvrecall.client import KvrecallClient, KvrecallError
from kvstore.format.page import VERSION

# What was held back has arrived within this.
ARRIVAL_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
# The beginning of the command that stores a page (`kvstore.tiers.redis.keys`).
PUT = b"SET\r\n$70\r\nkvrecall:%d:" % VERSION


def commit_late(stage: Stage) -> None:
    """A gateway's commit is under way while another one moves the session: it changes nothing.

    The commit is known by its text, so this one is not encrypted.
    """
    setup = cluster(stage.folder, stage.rig, encrypted=False)
    link = setup.to_redis[len(setup.workers)]  # of the first gateway
    with stage.started(setup):
        other = FaultClient(setup.urls[1:], stage.counters, stage.rng)
        try:
            contest = stage.talk(other)
            text = stage.words(20)
            link.stall_at(text.encode())
            saying = Thread(target=_say, args=(setup.urls[0], contest, text))
            saying.start()
            stage.expect(link.marked.wait(PATIENCE_SECONDS), "no commit came")
            other.retry(lambda each: asdict(each.move(contest.session)))
            link.heal()
            time.sleep(ARRIVAL_SECONDS)
            for _ in range(3):
                contest.say(other, stage.words(4))
            saying.join()
            said = [turn.messages[-1].content for turn in read_log(setup, contest.session)]
            stage.expect(text not in said, "a commit under an earlier epoch was accepted")
            stage.check(setup, other, contest)
        finally:
            other.close()


def pages_late(stage: Stage) -> None:
    """A worker's last pages arrive in Redis after another one went on: they change nothing.

    Once their session is deleted, they expire within minutes.
    """
    setup = cluster(stage.folder, stage.rig)
    assert setup.redis is not None, "a cluster has one"
    with stage.started(setup) as client, setup.redis.client() as redis:
        contest = stage.talk(client)
        name = client.retry(lambda each: each.get_session(contest.session)).worker
        number = [worker.name for worker in setup.workers].index(name)
        link = setup.to_redis[number]
        link.stall_at(PUT)
        contest.say(client, stage.words())
        stage.expect(link.marked.wait(PATIENCE_SECONDS), "no page came")
        setup.workers[number].kill()
        contest.say(client, stage.words(4))
        link.heal()
        time.sleep(ARRIVAL_SECONDS)
        setup.workers[number].start()
        contest.say(client, stage.words(4))
        ids = read_page_ids(setup)
        stage.check(setup, client, contest)
        with suppress(TimeoutError):
            until(lambda: not find_lasting(redis, ids), "pages are deleted", LEAK_SECONDS)
        stage.expect(not find_lasting(redis, ids), "pages of a deleted session stay in Redis")


def _say(url: str, contest: Contest, text: str) -> None:
    """Send a turn once."""
    contest.sent[text] = 1
    with suppress(KvrecallError), KvrecallClient(url, 60.0) as client:  # in the log or not
        turn = client.turn(contest.session, contest.messages(text), max_tokens=12, queue=True)
        contest.acknowledged[text] = asdict(turn)
