"""Two gateways on one catalog.

One works on a session at a time, and whoever was taken over from cannot write.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.errors import SessionBusy, StaleEpoch
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService
from services.sessions.leases import Claim, Leases
from services.streams.turn import TurnStream

HELLO = Message("user", "hello there")
QUICK = ServiceLimits(claim_seconds=0.15, queue_seconds=5)


@pytest.fixture
def settings() -> ServiceLimits:
    return QUICK


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    """A catalog with one session, of epoch 1 and in worker one."""
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db")
    settings = SessionSettings(budget=64, repair_rows=0, method="snapkv")
    await catalog.sessions.create(
        Session("s", 1, settings, 0.0, 0.0, 0, MemoryReport(), worker="one"), b"", None
    )
    yield catalog
    await catalog.close()


async def test_a_claim_lasts_as_long_as_the_work_and_is_given_back(catalog: SqliteCatalog) -> None:
    one = Leases(catalog, QUICK)
    other = Leases(catalog, QUICK)
    async with one.held(Claim("s")):
        await asyncio.sleep(0.4)  # longer than it lasts without being renewed
        with pytest.raises(SessionBusy):
            async with other.held(Claim("s")):
                pass
    async with other.held(Claim("s")):
        pass


async def test_several_tasks_of_one_process_hold_a_claim_together(catalog: SqliteCatalog) -> None:
    one = Leases(catalog, QUICK)
    other = Leases(catalog, QUICK)
    claim = Claim("s")
    async with one.held(claim):
        async with one.held(claim):
            pass
        with pytest.raises(SessionBusy):
            async with other.held(Claim("s")):
                pass


async def test_who_waits_has_the_claim_when_it_is_given_back(catalog: SqliteCatalog) -> None:
    one = Leases(catalog, QUICK)
    other = Leases(catalog, QUICK)
    ends = asyncio.Event()
    order = list[str]()

    async def first() -> None:
        async with one.held(Claim("s")):
            await ends.wait()
            order.append("one")

    async def second() -> None:
        async with other.held(Claim("s"), patience=5):
            order.append("other")

    working = asyncio.create_task(first())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(second())
    await asyncio.sleep(0.05)
    ends.set()
    await asyncio.gather(working, waiting)
    assert order == ["one", "other"]


async def test_a_claim_of_a_process_that_is_gone_ends_by_itself(catalog: SqliteCatalog) -> None:
    await catalog.leases.claim("s", "a process that is gone", 0.05)
    async with Leases(catalog, QUICK).held(Claim("s"), patience=QUICK.claim_seconds):
        pass


def get_lease(claim: Claim) -> tuple[int | None, str]:
    """Epoch and worker of a claim, which change while the test waits."""
    return claim.epoch, claim.worker


async def test_an_epoch_is_kept_until_another_process_takes_over(catalog: SqliteCatalog) -> None:
    one = Leases(catalog, QUICK)
    other = Leases(catalog, QUICK)
    mine = Claim("s")
    theirs = Claim("s")
    async with one.held(mine):
        assert mine.worker == "one"
        assert (epoch := await one.take_over(mine, "two")) == 2
        assert await one.take_over(mine, "two") == epoch  # no worker was told of it yet
        mine.unused = False
        assert await one.take_over(mine, "two") == epoch + 1
    async with one.held(mine):
        assert mine.epoch == epoch + 1
    async with other.held(theirs):
        assert get_lease(theirs) == (None, "two")
        await other.take_over(theirs, "one")
    async with one.held(mine):
        assert get_lease(mine) == (None, "one")


async def test_who_was_taken_over_from_cannot_take_over_in_the_middle_of_its_work(
    catalog: SqliteCatalog,
) -> None:
    one = Leases(catalog, QUICK)
    claim = Claim("s")
    async with one.held(claim):
        await one.take_over(claim, "one")
        await catalog.leases.take_over("s", "two")
        with pytest.raises(StaleEpoch):
            await one.take_over(claim, "one")


async def test_work_whose_claim_was_lost_ends(catalog: SqliteCatalog) -> None:
    leases = Leases(catalog, QUICK)
    claim = Claim("s")

    async def work() -> None:
        async with leases.held(claim):
            await leases.take_over(claim, "one")
            await catalog.leases.take_over(
                "s", "two"
            )  # as if this process had been stopped, and another one had gone on
            await asyncio.Event().wait()

    with pytest.raises(StaleEpoch, match="another process"):
        await work()
    assert claim.epoch is None
    async with leases.held(claim):
        pass


async def test_work_that_is_over_as_its_claim_is_lost_has_ended(
    catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not cancelled while it gives the claim back."""
    leases = Leases(catalog, QUICK)
    renewing, over = asyncio.Event(), asyncio.Event()

    async def lose(*arguments: object) -> None:
        renewing.set()
        await over.wait()
        raise SessionBusy("another process has it")

    async def work() -> str:
        async with leases.held(Claim("s")):
            monkeypatch.setattr(catalog.leases, "claim", lose)
            await renewing.wait()
        return "done"

    working = asyncio.create_task(work())
    await renewing.wait()
    await asyncio.sleep(0.01)
    over.set()
    assert await working == "done"


async def test_cancelled_work_is_cancelled_and_gives_its_claim_back(catalog: SqliteCatalog) -> None:
    leases = Leases(catalog, QUICK)
    begun = asyncio.Event()

    async def work() -> None:
        async with leases.held(Claim("s")):
            begun.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await catalog.leases.claim("s", "another", 1.0)


@pytest.fixture
async def others(harness) -> AsyncIterator[SessionService]:
    """A second gateway over the harness' catalog and worker."""
    service = SessionService(harness.worker, harness.catalog, QUICK)
    await service.start()
    yield service
    await service._timeouts.stop()
    await service._background.stop()


async def said(service: SessionService, session: str, **options: Any) -> TurnOutcome:
    """A turn's outcome."""
    stream = service.turn(session, TurnRequest((HELLO,), **options))
    ended = [progress async for progress in stream][-1]
    assert isinstance(ended, TurnFinished)
    return ended.outcome


async def test_two_gateways_take_turns_in_a_session(harness, others: SessionService) -> None:
    session = await harness.session()
    twin = await harness.session()
    assert [
        (await harness.say(session, HELLO)).turn,
        (await said(others, session)).turn,
        (await said(others, session)).turn,
        (await harness.say(session, HELLO)).turn,
    ] == [1, 2, 3, 4]
    for _ in range(4):
        await harness.say(twin, HELLO)
    assert await harness.selection(session) == await harness.selection(twin)
    assert harness.worker.epochs == sorted(harness.worker.epochs)


async def test_a_turn_of_another_gateway_is_waited_for_or_refused(
    harness, others: SessionService
) -> None:
    session = await harness.session()
    harness.worker.gates["token"] = asyncio.Event()
    first = harness.service.turn(session, TurnRequest((HELLO,)))
    await harness.worker.reached["token"].wait()
    with pytest.raises(SessionBusy):
        await said(others, session)
    waiting = asyncio.create_task(said(others, session, queue=True))
    await asyncio.sleep(0.05)
    harness.worker.gates["token"].set()
    assert [told async for told in first][-1].outcome.turn == 1
    assert (await waiting).turn == 2


async def test_a_gateway_that_was_stopped_in_a_turn_cannot_commit_it(
    harness, others: SessionService
) -> None:
    session = await harness.session()
    await harness.say(session, HELLO)
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    first = harness.service.turn(session, TurnRequest((HELLO,)))
    await harness.worker.reached["token"].wait()
    harness.service._sessions.find(session).claim.renewing.cancel()
    held = harness.worker.gates
    harness.worker.gates = {}
    assert (await said(others, session, queue=True)).turn == 2
    held["token"].set()
    with pytest.raises(StaleEpoch):
        await ended(first)
    assert [turn.number for turn in await harness.catalog.turns.get_after(session, 0, 10)] == [1, 2]
    assert (await harness.say(session, HELLO)).turn == 3


async def ended(stream: TurnStream) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass
