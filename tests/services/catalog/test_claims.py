"""Claims, which expire by themselves, and epochs, which only grow."""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.domain.errors import SessionBusy, UnknownSession
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import Lease


@pytest.fixture
async def catalog(catalog: Catalog, make_session: Callable[..., Session]) -> Catalog:
    """A catalog with the session s."""
    await catalog.sessions.create(make_session("s"), b"", None)
    return catalog


async def test_a_claim_excludes_other_holders_until_it_is_released(
    catalog: Catalog,
) -> None:
    assert await catalog.leases.claim("s", "one", 60) == Lease(1, "")
    with pytest.raises(SessionBusy, match="one"):
        await catalog.leases.claim("s", "other", 60)
    assert await catalog.leases.claim("s", "one", 60) == Lease(1, "")
    await catalog.leases.release("s", "other")
    with pytest.raises(SessionBusy):
        await catalog.leases.claim("s", "other", 60)
    await catalog.leases.release("s", "one")
    assert await catalog.leases.claim("s", "other", 60) == Lease(1, "")


async def test_a_claim_expires_and_is_extended_by_claiming_again(catalog: Catalog) -> None:
    await catalog.leases.claim("s", "one", 60)
    await catalog.leases.claim("s", "one", 0.01)
    await asyncio.sleep(0.05)
    await catalog.leases.claim("s", "other", 60)
    with pytest.raises(SessionBusy):
        await catalog.leases.claim("s", "one", 60)


async def test_a_claim_returns_the_epoch_and_worker_of_the_last_takeover(catalog: Catalog) -> None:
    assert await catalog.leases.take_over("s", "worker 1") == 2
    assert await catalog.leases.take_over("s", "worker 2") == 3
    assert await catalog.leases.claim("s", "one", 60) == Lease(3, "worker 2")
    session = await catalog.sessions.get("s")
    assert (session.epoch, session.worker) == (3, "worker 2")


async def test_each_takeover_gets_an_epoch_of_its_own(catalog: Catalog) -> None:
    epochs = await asyncio.gather(
        *(catalog.leases.take_over("s", f"worker {n}") for n in range(10))
    )
    assert sorted(epochs) == list(range(2, 12))


async def test_one_of_many_concurrent_holders_gets_the_claim(catalog: Catalog) -> None:
    claims = [catalog.leases.claim("s", f"holder {n}", 60) for n in range(10)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    assert outcomes.count(Lease(1, "")) == 1
    assert sum(isinstance(outcome, SessionBusy) for outcome in outcomes) == 9


async def test_an_unknown_or_deleted_session_cannot_be_claimed(
    catalog: Catalog, make_session: Callable[..., Session]
) -> None:
    with pytest.raises(UnknownSession):
        await catalog.leases.claim("unknown", "one", 60)
    await catalog.leases.claim("s", "one", 60)
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.leases.claim("s", "one", 60)
    await catalog.leases.release("s", "one")
