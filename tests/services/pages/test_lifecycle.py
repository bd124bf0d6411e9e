"""Random sessions, forks, deletions and failures: sessions have their pages, all others are deleted."""

import random
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError, WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from services.lifecycle.forks import ForkRequest

SYSTEM = Message("system", "you help people with everything they want")
STEPS = 60


@pytest.fixture
def settings() -> ServiceLimits:
    """All pages are old enough to be deleted."""
    return ServiceLimits(queue_seconds=5, drain_seconds=5, unknown_page_seconds=1e-9, kept_states=2)


async def fail(*_: object) -> None:
    raise CatalogError("no space left")


async def break_turn(harness: Any, session: str, words: str) -> None:
    """Run a turn whose pages are written and that is not committed."""
    commit = harness.catalog.turns.commit
    harness.catalog.turns.commit = fail
    with pytest.raises(CatalogError):
        await harness.say(session, SYSTEM, Message("user", words))
    harness.catalog.turns.commit = commit


async def step(harness: Any, rng: random.Random) -> None:
    """Run a random step: a request of a client, a failure, or a deletion of pages."""
    sessions = await harness.catalog.sessions.get_ids()
    chosen = rng.choice(sessions) if sessions else ""
    words = " ".join(rng.choice("abcdef") for _ in range(rng.randrange(1, 12)))
    match rng.choice(
        ["create", "say", "say", "fork", "fork", "delete", "crash", "break", "collect", "sweep"]
    ):
        case "create":
            session = await harness.session(tenant=rng.choice(["", "ann"]))
            if rng.random() < 0.8:
                await harness.say(session, SYSTEM, Message("user", words))
        case "say" if chosen:
            await harness.say(chosen, Message("user", words))
        case "fork" if chosen and (turns := (await harness.catalog.sessions.get(chosen)).turns):
            at = rng.choice([None, rng.randint(1, turns)])
            await harness.service.fork(chosen, ForkRequest(at))
        case "delete" if chosen:
            if rng.random() < 0.3:
                harness.worker.faults["delete"] = WorkerLost("gone")
            await harness.service.delete(chosen)
        case "crash":
            words_before = harness.worker.words
            await harness.crash()
            harness.worker.words |= words_before
        case "break" if chosen:
            await break_turn(harness, chosen, words)
        case "collect":
            await harness.collect()
        case "sweep":
            await sweep(harness)


async def sweep(harness: Any) -> None:
    """Sweep as often as it takes to delete what is unknown."""
    swept = harness.build_sweep()
    for _ in range(2):
        await swept.sweep("one")


@pytest.mark.parametrize("seed", range(6))
async def test_pages_are_stored_exactly_as_long_as_a_session_has_them(harness, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(STEPS):
        await step(harness, rng)
        for session in await harness.catalog.sessions.get_ids():
            pages = await harness.get_pages(session)
            assert harness.worker.pages.keys() >= {*pages}
            assert await harness.catalog.pages.find_live(pages) == pages
    for session in await harness.catalog.sessions.get_ids():
        await harness.service.delete(session)
    harness.worker.sessions.clear()  # of turns that were not committed, released once they are idle
    await harness.collect()
    await sweep(harness)
    assert not harness.worker.pages
    assert await harness.catalog.pages.count_dead() == 0
