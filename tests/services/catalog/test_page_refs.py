"""Whatever is created, forked, deleted and lost in crashes: no page goes that is used, and in the end none stays."""

import random
from collections.abc import Iterable

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import Message
from services.forks import ForkRequest

SYSTEM = Message("system", "you help people with everything they want")
ALL = 1 << 20
STEPS = 60


class Stored:
    """How many of each session's first pages the workers' rows still have."""

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}

    def follow(self, worker) -> None:
        """Do what a worker was told since: open, drop, and what is retained at its start."""
        for session in worker.specs:
            self.pages.setdefault(session, ALL)
        if worker.retained is not None:
            shared = {each.owner: each.pages for each in worker.retained.shared}
            for session in set(self.pages) - set(worker.retained.sessions) - set(worker.specs):
                self._keep(session, shared.get(session, 0))
            worker.retained = None
        for session, pages in worker.dropped:
            self._keep(session, pages)
        worker.dropped.clear()

    def _keep(self, session: str, pages: int) -> None:
        self.pages[session] = min(self.pages.get(session, 0), pages)

    def check(self, sessions: Iterable) -> None:
        """Every session has its own pages, and those of others that it begins with."""
        for session in sessions:
            assert self.pages[session.id] == ALL
            for shared in session.shared:
                assert self.pages.get(shared.owner, 0) >= shared.pages, (
                    f"{session.id} lost pages of {shared.owner}"
                )


async def step(harness, rng: random.Random) -> None:
    """Something that clients or fate do."""
    sessions = await harness.catalog.sessions.get_ids()
    chosen = rng.choice(sessions) if sessions else ""
    words = " ".join(rng.choice("abcdef") for _ in range(rng.randrange(1, 12)))
    match rng.choice(["create", "say", "say", "fork", "fork", "delete", "crash", "break"]):
        case "create":
            session = await harness.session(tenant=rng.choice(["", "ann"]))
            if rng.random() < 0.8:
                await harness.say(session, SYSTEM, Message("user", words))
        case "say" if chosen:
            await harness.say(chosen, Message("user", words))
        case "fork" if chosen and (turns := (await harness.catalog.sessions.get(chosen)).turns):
            await harness.service.fork(
                chosen, ForkRequest(rng.choice([None, rng.randint(1, turns)]))
            )
        case "delete" if chosen:
            if rng.random() < 0.3:
                harness.worker.faults["delete"] = WorkerLost("gone")
            await harness.service.delete(chosen)
        case "crash":
            words_said = harness.worker.words
            await harness.crash()
            harness.worker.words |= words_said
        case "break" if chosen:
            harness.worker.faults["done"] = WorkerLost("gone")
            with pytest.raises(WorkerLost):
                await harness.say(chosen, SYSTEM, Message("user", words))


@pytest.mark.parametrize("seed", range(6))
async def test_pages_are_kept_as_long_as_they_are_used_and_no_longer(harness, seed: int) -> None:
    rng = random.Random(seed)
    stored = Stored()
    for _ in range(STEPS):
        worker = harness.worker
        await step(harness, rng)
        for told in dict.fromkeys((worker, harness.worker)):
            stored.follow(told)
        stored.check(
            [
                await harness.catalog.sessions.get(session)
                for session in await harness.catalog.sessions.get_ids()
            ]
        )
    for session in [*await harness.catalog.sessions.get_ids(), await harness.session()]:
        await harness.service.delete(session)
    stored.follow(harness.worker)
    assert set(stored.pages.values()) == {0}
    assert await harness.catalog.page_refs.get_retained() == []
