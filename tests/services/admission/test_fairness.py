"""Slots and the queue in front of them are fair to tenants, and say truly how long to wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import Overloaded
from kvrecall.domain.fairness.share import Share
from kvrecall.domain.limits import ServiceLimits
from services.admission.admission import Admission


class Crowd:
    """Requests to an admission; `order` has those that got a slot, as they did."""

    def __init__(self, slots: int, queue: int, **limits: float) -> None:
        settings = ServiceLimits(**{"queue_seconds": 60.0, **limits})  # type: ignore[arg-type]
        self.admission = Admission(slots, queue, "turns", settings)
        self.order: list[Share] = []
        self._ends: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def request(self, share: Share, tokens: float = 256) -> asyncio.Task[None]:
        """Begin a request, as far as it gets without another's end."""
        task = asyncio.create_task(self._hold(share, tokens))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._tasks.append(task)
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def end_one(self) -> None:
        """End the request that has had its slot longest."""
        self._ends.pop(0).set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        """End all requests, one after the other."""
        while self._ends:
            await self.end_one()
        assert self.admission.running == self.admission.waiting == 0

    async def _hold(self, share: Share, tokens: float) -> None:
        async with self.admission.slot(share):
            self.order.append(share)
            self.admission.charge(share, tokens)
            end = asyncio.Event()
            self._ends.append(end)
            await end.wait()


@asynccontextmanager
async def held(admission: Admission, *tenants: str) -> AsyncIterator[None]:
    """A slot for each of the tenants."""
    async with AsyncExitStack() as stack:
        for tenant in tenants:
            await stack.enter_async_context(admission.slot(Share(tenant)))
        yield


async def test_a_flood_fills_its_share_and_another_tenant_gets_a_slot_at_once() -> None:
    crowd = Crowd(16, 64)
    flood = [await crowd.request(Share("flood")) for _ in range(100)]
    refused = [task for task in flood if task.done()]
    assert (crowd.admission.running, crowd.admission.waiting, len(refused)) == (12, 48, 40)
    for task in refused:
        assert isinstance(task.exception(), Overloaded)
    await crowd.request(Share("late"))
    assert crowd.order[-1].tenant == "late"
    await crowd.end_all()


@pytest.mark.parametrize("tenants", [2, 3, 5])
async def test_of_several_floods_each_gets_as_many_slots(tenants: int) -> None:
    crowd = Crowd(16, 64)
    for _ in range(30):
        for tenant in range(tenants):
            await crowd.request(Share(str(tenant)))
    held = [sum(each.tenant == str(tenant) for each in crowd.order) for tenant in range(tenants)]
    assert max(held) - min(held) <= 1
    assert sum(held) < 16, "one that comes finds a slot"
    await crowd.end_all()


@given(st.lists(st.integers(0, 2), min_size=20, max_size=60))
def test_who_waits_is_admitted_by_tokens_not_by_arrival(arrivals: list[int]) -> None:
    async def check() -> None:
        crowd = Crowd(1, 1000, tenant_share=1)
        first = Share("first")
        await crowd.request(first)
        for tenant in arrivals:
            await crowd.request(Share(str(tenant)))
        while crowd.admission.waiting:
            await crowd.end_one()
            waiting = {each.share.tenant for each in crowd.admission._waiting}
            served = [sum(e.tenant == tenant for e in crowd.order) for tenant in waiting]
            assert not served or max(served) - min(served) <= 1
        await crowd.end_all()

    asyncio.run(check())


async def test_background_requests_wait_for_all_others() -> None:
    crowd = Crowd(1, 8)
    await crowd.request(Share("t", "1"))
    await crowd.request(Share("t", "2", background=True))
    await crowd.request(Share("t", "3"))
    await crowd.end_all()
    assert [each.flow for each in crowd.order] == ["1", "3", "2"]


async def test_a_tenants_keys_take_turns() -> None:
    crowd = Crowd(1, 16, tenant_share=1)
    for _ in range(6):
        await crowd.request(Share("t", "busy"))
    await crowd.request(Share("t", "other"))
    await crowd.end_one()
    assert crowd.order[-1].flow == "other"
    await crowd.end_all()


async def test_a_request_that_leaves_the_queue_leaves_nothing() -> None:
    crowd = Crowd(1, 4)
    await crowd.request(Share("t"))
    left = await crowd.request(Share("t"))
    left.cancel()
    await asyncio.wait({left})
    assert crowd.admission.waiting == 0
    await crowd.end_all()


@given(st.lists(st.sampled_from(["request", "end", "cancel", "wait"]), max_size=40))
def test_no_slot_is_lost_whoever_leaves_when(steps: list[str]) -> None:
    async def check() -> None:
        crowd = Crowd(2, 4, tenant_share=1)
        tasks: list[asyncio.Task[None]] = []
        for number, step in enumerate(steps):
            if step == "request":
                tasks.append(asyncio.create_task(crowd._hold(Share(str(number % 3)), 1)))
            elif step == "end" and crowd._ends:
                crowd._ends.pop(0).set()
            elif step == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            else:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert crowd.admission.running == crowd.admission.waiting == 0
        async with held(crowd.admission, "a", "b"):
            assert crowd.admission.running == 2

    asyncio.run(check())


async def test_retry_after_is_the_time_that_the_tenants_queue_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("services.admission.admission.time.monotonic", lambda: now[0])
    crowd = Crowd(2, 4, tenant_share=1)
    for _ in range(2):
        await crowd.request(Share("flood"))
    now[0] = 10.0
    for _ in range(6):
        await crowd.request(Share("flood"))
    await crowd.end_one()
    await crowd.end_one()
    refused = [await crowd.request(Share("flood")) for _ in range(3)][-1]
    error = refused.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds == 10 * 5 / 2, "five turns of ten seconds on two slots"
    assert "share" not in error.message
    await crowd.end_all()


async def test_another_tenant_waits_for_its_own_queue_alone() -> None:
    crowd = Crowd(1, 4)
    crowd.admission._seconds = 4.0
    for _ in range(6):
        await crowd.request(Share("flood"))
    assert crowd.admission._estimate_wait(Share("late")) == 4
    assert crowd.admission._estimate_wait(Share("flood")) == 4 * 4
    await crowd.end_all()


async def test_check_room_says_what_slot_would() -> None:
    admission = Admission(4, 0, "turns", ServiceLimits())
    async with held(admission, "flood", "flood", "flood"):
        with pytest.raises(Overloaded):
            admission.check_room(Share("flood"))
        admission.check_room(Share("late"))
        async with held(admission, "late"):
            with pytest.raises(Overloaded, match="which is its share"):
                admission.check_room(Share("flood"))
