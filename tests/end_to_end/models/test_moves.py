"""A session whose worker is killed goes on in another one, which finds its rows and states in Redis."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from faults.kinds.flips import page_names
from tests.end_to_end.models.conversation import Begin, Undisturbed
from tests.end_to_end.models.files import count_stored
from tests.end_to_end.servers import Cluster


@pytest.fixture(scope="session")
def cluster(new_cluster: Callable[..., Cluster]) -> Iterator[Cluster]:
    """Two workers of the model on Redis."""
    cluster = new_cluster()
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture(autouse=True)
def whole(cluster: Cluster) -> Iterator[None]:
    """Restore both workers after each test."""
    yield
    cluster.back()


def test_a_session_moves_when_its_worker_is_killed(
    cluster: Cluster, begin: Begin, method: str, undisturbed: Undisturbed
) -> None:
    before = cluster.metric("kvrecall_rebuild_seconds_count")
    conversation = begin(cluster, method, 2)
    first = cluster.own.get_session(conversation.session).worker
    cluster.owner(conversation.session).end(signal.SIGKILL)
    assert conversation.until(3).answers == undisturbed(method)[:3]
    assert cluster.own.get_session(conversation.session).worker != first
    assert cluster.metric("kvrecall_rebuild_seconds_count") == before, "nothing was computed again"


def test_a_session_is_moved_to_and_fro(
    cluster: Cluster, begin: Begin, undisturbed: Undisturbed
) -> None:
    conversation = begin(cluster, turns=1)
    for turns in (2, 3, 4):
        cluster.own.move(conversation.session)
        conversation.until(turns)
    assert conversation.answers == undisturbed()


def test_what_redis_has_lost_is_computed_again(
    cluster: Cluster, begin: Begin, undisturbed: Undisturbed, redis_url: str
) -> None:
    before = cluster.metric("kvrecall_rebuild_seconds_count")
    conversation = begin(cluster, turns=2)
    cluster.owner(conversation.session).end(signal.SIGKILL)
    with redis.Redis.from_url(redis_url) as connection:
        connection.delete(*page_names(connection))
    assert conversation.until(3).answers == undisturbed()[:3]
    assert cluster.metric("kvrecall_rebuild_seconds_count") == before + 1


def test_deleted_sessions_leave_nothing_in_redis_or_either_worker(
    cluster: Cluster, begin: Begin, say: Any, redis_url: str
) -> None:
    conversation = begin(cluster, turns=1)
    cluster.own.move(conversation.session)
    conversation.until(2)
    with redis.Redis.from_url(redis_url) as connection:
        assert find_kept(connection)
        for view in cluster.own.list_sessions(200).sessions:
            cluster.own.delete_session(view.id)
        say.until(lambda: not find_kept(connection), "no page in Redis that stays")
    for name, process in cluster.of_name.items():
        process.end(signal.SIGTERM)
        assert count_stored(cluster.folder / name) == [0, 0]


def find_kept(connection: redis.Redis) -> list[bytes]:
    """Find the keys of pages and states that live longer than deleted ones do."""
    return [key for key in page_names(connection) if connection.pttl(key) > 120_000]
