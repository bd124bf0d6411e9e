"""Several workers behind one protocol: where sessions and their calls go."""

import asyncio
from collections import Counter
from contextlib import ExitStack, aclosing, suppress

import pytest

from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.services.cluster.cluster import Cluster, serving


async def test_calls_of_a_session_go_to_the_worker_that_opened_it_last(cluster: Cluster) -> None:
    assert [await cluster.open("s", "a"), await cluster.open("t", "b")] == ["a", "b"]
    assert (await cluster.pool.memory("s")).length == 7
    await cluster.open("s", "b")
    await cluster.pool.memory("s")
    await cluster.pool.release(pb.ReleaseRequest(session="s"))
    assert cluster.servicers["a"].calls == ["open s", "memory s", "release s"]
    assert cluster.servicers["b"].calls == ["open t", "open s", "memory s"]


async def test_a_chosen_worker_counts_from_the_next_open(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    assert cluster.pool.choose_worker("s", "b") == "b"
    await cluster.pool.memory("s")
    assert cluster.servicers["a"].calls == ["open s", "memory s"]


async def test_a_fork_is_where_it_was_placed(cluster: Cluster) -> None:
    assert cluster.pool.choose_worker("child", "b") == "b"
    await cluster.pool.fork(pb.ForkRequest(spec=pb.SessionSpec(session="child")))
    await cluster.pool.memory("child")
    assert cluster.servicers["b"].calls == ["fork child", "memory child"]


async def test_a_session_that_this_gateway_never_opened_is_unknown_to_it(cluster: Cluster) -> None:
    with pytest.raises(WorkerRefused) as refused:
        await cluster.pool.memory("s")
    assert refused.value.code == "session_not_open"


async def test_the_owner_is_chosen_while_it_takes_sessions(cluster: Cluster) -> None:
    assert cluster.pool.choose_worker("s", "b") == "b"
    assert cluster.pool.choose_worker("s", "b", ["b"]) == "a"
    cluster.known.found["b"].draining = True
    await cluster.refreshed()
    assert cluster.pool.choose_worker("s", "b") == "a"
    with pytest.raises(WorkerLost, match="no worker that takes"):
        cluster.pool.choose_worker("s", "b", ["a"])


async def test_new_sessions_go_to_both(cluster: Cluster) -> None:
    assert {cluster.pool.choose_worker(f"s_{number}", "") for number in range(50)} == {"a", "b"}


async def test_sessions_of_a_family_go_to_one_worker_and_families_to_both(cluster: Cluster) -> None:
    chosen = {
        family: {cluster.pool.choose_worker(f"s_{n}", "", (), family) for n in range(10)}
        for family in map(str, range(50))
    }
    assert all(len(workers) == 1 for workers in chosen.values())
    assert set().union(*chosen.values()) == {"a", "b"}


async def test_a_family_goes_to_another_worker_when_its_own_drains(cluster: Cluster) -> None:
    home = cluster.pool.choose_worker("s", "", (), "family")
    (other,) = {"a", "b"} - {home}
    assert cluster.pool.choose_worker("s", "", [home], "family") == other
    cluster.known.found[home].draining = True
    await cluster.refreshed()
    assert cluster.pool.choose_worker("s", "", (), "family") == other


async def test_a_hundred_turns_of_one_family_spread_over_both_workers(cluster: Cluster) -> None:
    went: Counter[str] = Counter()
    with ExitStack() as turns:
        for number in range(100):
            turns.enter_context(cluster.pool.count_turn(f"s_{number}"))
            went[await cluster.open_in_family(f"s_{number}", "family")] += 1
            assert max(went.values()) <= 1.25 * (number + 1) / 2 + 1
    home = cluster.pool.choose_worker("s", "", (), "family")
    assert went[home] == max(went.values()) <= 1.25 * 50 + 1
    assert cluster.pool.choose_worker("t", "", (), "family") == home, "no turn runs any more"


async def test_a_sessions_own_turn_is_no_load_that_it_avoids(cluster: Cluster) -> None:
    home = cluster.pool.choose_worker("s", "", (), "family")
    with ExitStack() as turns:
        for number in range(2):
            turns.enter_context(cluster.pool.count_turn(f"s_{number}"))
            await cluster.open(f"s_{number}", home)
        assert cluster.pool.choose_worker("s_0", "", (), "family") == home
        assert cluster.pool.choose_worker("s", "", (), "family") != home


async def test_a_turn_counts_where_its_session_is_opened_last(cluster: Cluster) -> None:
    home = cluster.pool.choose_worker("s", "", (), "family")
    (other,) = {"a", "b"} - {home}
    with ExitStack() as turns:
        for number in range(20):
            turns.enter_context(cluster.pool.count_turn(f"s_{number}"))
            await cluster.open(f"s_{number}", home)
        assert cluster.pool.choose_worker("s", "", (), "family") == other
        for number in range(20):
            await cluster.open(f"s_{number}", other)
        assert cluster.pool.choose_worker("s", "", (), "family") == home


async def test_a_call_that_is_lost_sends_the_next_session_elsewhere(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    await cluster.servers["a"].aclose()
    with pytest.raises(WorkerLost):
        await cluster.pool.memory("s")
    assert cluster.pool.choose_worker("s", "a") == "b"


async def test_calls_in_a_worker_that_vanishes_are_lost_at_once(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    async with aclosing(cluster.pool.turn(pb.TurnRequest(session="s"))) as turn:
        assert (await anext(turn)).token.text == "one"
        del cluster.known.found["a"]
        await cluster.refreshed()
        assert await cluster.names() == ["a", "b"], "it is not in the registry, but it answers"
        cluster.servicers[
            "a"
        ].answers.clear()  # as a machine that is gone: the connection is not even closed
        with pytest.raises(WorkerLost, match="closed"):
            await anext(turn)
    assert await cluster.names() == ["b"]
    with pytest.raises(WorkerLost, match="gone"):
        await cluster.pool.memory("s")


async def test_a_deletion_goes_to_all_workers(cluster: Cluster) -> None:
    await cluster.pool.delete(pb.DeleteRequest(session="s"))
    assert [each.calls for each in cluster.servicers.values()] == [["delete s"], ["delete s"]]
    assert {name: stats.sessions for name, stats in (await cluster.pool.stats()).items()} == {
        "a": 3,
        "b": 3,
    }
    await cluster.servers["b"].aclose()
    with pytest.raises(WorkerLost, match="of 2 workers 1"):
        await cluster.pool.delete(pb.DeleteRequest(session="t"))
    assert cluster.servicers["a"].calls == ["delete s", "delete t"]
    assert list(await cluster.pool.stats()) == ["a"]
    assert (await cluster.pool.embed(["cat"])).dimensions == 3
    await cluster.servers["a"].aclose()
    for call in (
        cluster.pool.stats(),
        cluster.pool.delete(pb.DeleteRequest(session="u")),
        cluster.pool.embed(["cat"]),
    ):
        with pytest.raises(WorkerLost):
            await call


async def test_pages_are_deleted_in_all_workers_or_in_a_named_one(cluster: Cluster) -> None:
    request = pb.DeletePagesRequest(page_ids=b"pages")
    assert (await cluster.pool.delete_pages(request)).deleted == 4
    assert (await cluster.pool.delete_pages(request, "b")).deleted == 2
    assert [len(each.calls) for each in cluster.servicers.values()] == [1, 2]
    request_list = pb.ListPagesRequest(older_than_seconds=3)
    listed = [part.page_ids async for part in cluster.pool.list_pages("a", request_list)]
    assert listed == [b"p" * 16, b"q" * 16]
    assert cluster.servicers["a"].calls == ["delete pages", "list 3"]


async def test_a_deletion_of_pages_that_one_worker_did_not_do_is_not_done(cluster: Cluster) -> None:
    request = pb.DeletePagesRequest(page_ids=b"pages")
    cluster.servicers["a"].refuses = "storage_failed"
    with pytest.raises(WorkerRefused):
        await cluster.pool.delete_pages(request)
    assert cluster.servicers["b"].calls == ["delete pages"]
    cluster.servicers["a"].refuses = ""
    await cluster.servers["b"].aclose()
    with pytest.raises(WorkerLost):
        await cluster.pool.delete_pages(request)
    assert cluster.servicers["a"].calls == ["delete pages"]
    await cluster.servers["a"].aclose()
    await cluster.refreshed()
    with pytest.raises(WorkerLost):
        await cluster.pool.delete_pages(request)


async def test_a_worker_with_pages_of_another_catalog_is_left_out(cluster: Cluster) -> None:
    cluster.servicers["a"].refuses = "catalog_mismatch"
    with pytest.raises(WorkerRefused):
        await anext(cluster.pool.list_pages("a", pb.ListPagesRequest()))
    with pytest.raises(WorkerLost, match="gone"):
        await anext(cluster.pool.list_pages("a", pb.ListPagesRequest()))


async def test_a_worker_that_was_away_gets_its_releases_when_it_is_back(cluster: Cluster) -> None:
    for session in ("s", "t"):
        await cluster.open(session, "a")
    a = cluster.servicers["a"]
    address = cluster.known.found["a"].address
    await cluster.servers["a"].aclose()
    for session in ("s", "t"):
        with pytest.raises(WorkerLost):
            await cluster.pool.memory(session)
    await cluster.open("s", "a", ["a"])
    with suppress(WorkerLost):  # raised until the pool has left the worker out
        await cluster.pool.delete(pb.DeleteRequest(session="t"))
    a.calls.clear()
    a.refuses = "storage_failed"
    async with serving(a, int(address.rpartition(":")[2])):
        for _ in range(2):
            await cluster.refreshed()
        assert "delete t" not in a.calls
        a.refuses = ""
        for _ in range(200):
            if len(a.calls) == 2:
                break
            await asyncio.sleep(0.05)
        assert sorted(a.calls) == ["delete t", "release s"]
        await cluster.refreshed()
        assert len(a.calls) == 2
        await cluster.open("s", "a")
        await cluster.refreshed()
    assert cluster.servicers["b"].calls == ["open s", "delete t", "release s"]


async def test_the_limits_hold_in_every_worker(cluster: Cluster) -> None:
    described = await cluster.pool.describe()
    assert (described.model, described.slots, described.max_budget) == ("one", 8, 256)
