"""Random sessions, forks, deletions and crashes: used pages stay, all others are deleted."""

import random
from collections.abc import Iterable

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import Message
from services.lifecycle.forks import ForkRequest

SYSTEM = Message("system", "you help people with everything they want")
ALL = 1 << 20
STEPS = 60


class Stored:
    """The number of first pages that the workers still store of each session."""

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}

    def follow(self, worker) -> None:
        """Apply a worker's calls since: opened and dropped sessions."""
        for session in worker.specs:
            self.pages.setdefault(session, ALL)
        for session, pages in worker.dropped:
            self._retain_only(session, pages)
        worker.dropped.clear()

    def _retain_only(self, session: str, pages: int) -> None:
        self.pages[session] = min(self.pages.get(session, 0), pages)

    def check(self, sessions: Iterable) -> None:
        """Check that each session has its own pages and the pages it references."""
        for session in sessions:
            assert self.pages[session.id] == ALL
            for shared in session.shared:
                assert self.pages.get(shared.owner, 0) >= shared.pages, (
                    f"{session.id} lost pages of {shared.owner}"
                )


async def step(harness, rng: random.Random) -> None:
    """Run a random step: a request of a client, or a failure."""
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
                harness.worker.faults["drop"] = WorkerLost("gone")
            await harness.service.delete(chosen)
        case "crash":
            words_before = harness.worker.words
            await harness.crash()
            await harness.reconcile()
            harness.worker.words |= words_before
        case "break" if chosen:
            harness.worker.faults["done"] = WorkerLost("gone")
            with pytest.raises(WorkerLost):
                await harness.say(chosen, SYSTEM, Message("user", words))


@pytest.mark.parametrize("seed", range(6))
async def test_pages_are_retained_exactly_as_long_as_they_are_referenced(
    harness, seed: int
) -> None:
    rng = random.Random(seed)
    stored = Stored()
    for _ in range(STEPS):
        worker = harness.worker
        await step(harness, rng)
        for each in dict.fromkeys((worker, harness.worker)):
            stored.follow(each)
        stored.check(
            [
                await harness.catalog.sessions.get(session)
                for session in await harness.catalog.sessions.get_ids()
            ]
        )
    for session in [*await harness.catalog.sessions.get_ids(), await harness.session()]:
        await harness.service.delete(session)
    await harness.sweep()
    await harness.reconcile()
    stored.follow(harness.worker)
    assert set(stored.pages.values()) == {0}
    assert await harness.catalog.page_refs.get_retained() == []
