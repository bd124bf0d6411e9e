"""Quotas: each sees its own sessions only, and holds no more than it may."""

import asyncio

import pytest

from kvrecall.domain.errors import InvalidRequest, LimitExceeded, QuotaExceeded, UnknownSession
from kvrecall.domain.events import QuotaReached, TurnFailed
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.quota import TenantLimits, build_refusal
from services.lifecycle.forks import ForkRequest
from services.reading.search import SessionQuery

HELLO = Message("user", "hello there")


async def test_a_tenants_list_has_its_own_sessions_only(harness) -> None:
    ours = [await harness.session(tenant="ann") for _ in range(3)]
    await harness.session(tenant="ben")
    nobodys = await harness.session()
    page = await harness.service.reading.search(SessionQuery(2), "ann")
    rest = await harness.service.reading.search(SessionQuery(2, page.next_cursor), "ann")
    assert [session.id for session, _ in (*page.sessions, *rest.sessions)] == ours[::-1]
    others = await harness.service.reading.search(SessionQuery(9), "")
    assert [session.id for session, _ in others.sessions] == [nobodys]


async def test_another_tenants_session_is_unknown(harness) -> None:
    session = await harness.session(tenant="ann")
    await harness.service.check_tenant(session, "ann")
    for tenant in ("", "ben"):
        with pytest.raises(UnknownSession):
            await harness.service.check_tenant(session, tenant)


async def test_a_turn_is_not_compared_with_another_tenants_session(harness) -> None:
    others = await harness.session(tenant="ben")
    own = await harness.session(tenant="ann")
    with pytest.raises(InvalidRequest) as caught:
        await harness.say(own, HELLO, compare_with=others)
    assert caught.value.details["field"] == "logprobs.compare_with"
    assert (
        await harness.say(own, HELLO, compare_with=await harness.session(tenant="ann"))
    ).fidelity is not None


async def test_a_fork_is_its_parents_tenants(harness) -> None:
    session = await harness.session(tenant="ann")
    await harness.say(session, HELLO)
    assert (await harness.service.fork(session, ForkRequest())).settings.tenant == "ann"


class TestSessions:
    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(
            queue_seconds=5, drain_seconds=5, tenant_sessions=2, max_metadata_bytes=10
        )

    async def test_a_tenant_has_no_more_sessions_than_it_may(self, harness) -> None:
        session = await harness.session(tenant="ann")
        await harness.say(session, HELLO)
        other = await harness.session(tenant="ann")
        for create in (
            harness.session(tenant="ann"),
            harness.service.fork(session, ForkRequest()),
        ):
            with pytest.raises(QuotaExceeded) as caught:
                await create
            assert caught.value.details["limit"] == 2
        assert await harness.session(tenant="ben")
        await harness.service.delete(other)
        assert await harness.service.fork(session, ForkRequest())

    async def test_of_creations_and_forks_at_once_no_more_succeed_than_there_is_room_for(
        self, harness
    ) -> None:
        session = await harness.session(tenant="ann")
        await harness.say(session, HELLO)
        opened, worker_open = asyncio.Event(), harness.worker.open

        async def open_late(request: pb.OpenRequest) -> None:
            await opened.wait()
            await worker_open(request)

        harness.worker.open = open_late
        creations = [asyncio.create_task(harness.session(tenant="ann")) for _ in range(50)]
        await asyncio.sleep(
            0.1
        )  # by now as many as may are on the way, and there was room for each
        forks = [harness.service.fork(session, ForkRequest(queue=True)) for _ in range(8)]
        opened.set()
        results = await asyncio.gather(*creations, *forks, return_exceptions=True)
        refused = [each for each in results if isinstance(each, QuotaExceeded)]
        assert len(refused) == len(results) - 1
        assert len(await harness.catalog.sessions.get_ids()) == 2

    async def test_sessions_make_no_room_for_conversations(self, harness) -> None:
        session = await harness.session(tenant="ann", matched=True)
        await harness.say(session, HELLO)

        async def write(limits: TenantLimits) -> None:
            raise build_refusal("conversations", 3, 2)

        with pytest.raises(QuotaExceeded):
            await harness.service._context.quotas.keep_within("ann", write)
        assert await harness.catalog.sessions.get_ids() == [session]

    async def test_metadata_has_a_limit_in_bytes(self, harness) -> None:
        session = await harness.session(metadata={"key": "1234567"})
        await harness.say(session, HELLO)
        for create in (
            harness.session(metadata={"key": "éééé"}),
            harness.service.fork(session, ForkRequest(metadata={"a": "1234567890"})),
        ):
            with pytest.raises(LimitExceeded) as caught:
                await create
            assert caught.value.details == {"field": "metadata", "limit": 10}


class TestQuota:
    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, drain_seconds=5, tenant_tokens=10)

    async def test_a_tenant_that_holds_all_it_may_says_no_more(self, harness) -> None:
        session = await harness.session(tenant="ann")
        told = harness.hear()
        await harness.say(session, Message("user", "1 2 3 4 5 6 7 8"))
        with pytest.raises(QuotaExceeded) as caught:
            await harness.say(session, HELLO)
        assert caught.value.details == {"limit": 10}
        assert told[-2:] == [QuotaReached("ann"), TurnFailed(session, "quota_exceeded")]
        with pytest.raises(QuotaExceeded):
            await harness.session(tenant="ann")

    async def test_a_fork_counts_as_what_it_holds(self, harness) -> None:
        session = await harness.session(tenant="ann")
        await harness.say(session, HELLO)
        child = await harness.service.fork(session, ForkRequest())
        assert (await harness.catalog.sessions.get_use("ann")).tokens == 8
        with pytest.raises(QuotaExceeded):
            await harness.service.fork(session, ForkRequest())
        await harness.service.delete(child.id)
        await harness.service.fork(session, ForkRequest())

    async def test_one_tenants_quota_is_not_anothers(self, harness) -> None:
        session = await harness.session(tenant="ann")
        await harness.say(session, Message("user", "1 2 3 4 5 6 7 8"))
        other = await harness.session(tenant="ben")
        assert (await harness.say(other, HELLO)).turn == 1

    async def test_what_is_deleted_counts_no_more(self, harness) -> None:
        session = await harness.session(tenant="ann")
        await harness.say(session, Message("user", "1 2 3 4 5 6 7 8"))
        await harness.service.delete(session)
        assert await harness.session(tenant="ann")
