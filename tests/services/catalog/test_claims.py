"""Who works on a session, and who may write it: claims end by themselves, epochs never go back."""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.domain.errors import SessionBusy, UnknownSession
from kvrecall.domain.session import Session
from services.catalog.base import Catalog
from services.catalog.records import Lease


@pytest.fixture
async def catalog(catalog: Catalog, make_session: Callable[..., Session]) -> Catalog:
    """A catalog with the session s."""
    await catalog.sessions.create(make_session("s"), b"", None)
    return catalog


async def test_one_holder_keeps_the_others_out_until_it_gives_the_session_back(
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


async def test_a_claim_ends_by_itself_and_begins_anew_each_time(catalog: Catalog) -> None:
    await catalog.leases.claim("s", "one", 60)
    await catalog.leases.claim("s", "one", 0.01)
    await asyncio.sleep(0.05)
    await catalog.leases.claim("s", "other", 60)
    with pytest.raises(SessionBusy):
        await catalog.leases.claim("s", "one", 60)


async def test_a_claim_tells_who_had_the_session_last(catalog: Catalog) -> None:
    assert await catalog.leases.take_over("s", "worker 1") == 2
    assert await catalog.leases.take_over("s", "worker 2") == 3
    assert await catalog.leases.claim("s", "one", 60) == Lease(3, "worker 2")
    session = await catalog.sessions.get("s")
    assert (session.epoch, session.worker) == (3, "worker 2")


async def test_every_one_who_takes_over_gets_an_epoch_of_its_own(catalog: Catalog) -> None:
    epochs = await asyncio.gather(
        *(catalog.leases.take_over("s", f"worker {n}") for n in range(10))
    )
    assert sorted(epochs) == list(range(2, 12))


async def test_only_one_of_many_holders_gets_the_session(catalog: Catalog) -> None:
    asked = [catalog.leases.claim("s", f"holder {n}", 60) for n in range(10)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers.count(Lease(1, "")) == 1
    assert sum(isinstance(answer, SessionBusy) for answer in answers) == 9


async def test_nobody_claims_what_is_not_there(
    catalog: Catalog, make_session: Callable[..., Session]
) -> None:
    with pytest.raises(UnknownSession):
        await catalog.leases.claim("nobody", "one", 60)
    await catalog.leases.claim("s", "one", 60)
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.leases.claim("s", "one", 60)
    await catalog.leases.release("s", "one")
