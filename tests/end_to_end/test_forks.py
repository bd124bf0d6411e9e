"""Forks and shared prefixes with a real model.

Replies equal those of plain sessions, nothing leaks.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import redis

from kvrecall.client import ForkOrigin, KvrecallClient, KvrecallError

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
GREEDY: Json = {"max_tokens": 12}
QUESTION = "What is the code of Ada's locker?"
TOLD = 3
PAGE = 64


@pytest.fixture
def tenant(server: Any) -> Iterator[Callable[[str], KvrecallClient]]:
    """A client of the shared server for a tenant."""
    made: list[KvrecallClient] = []

    def client(name: str) -> KvrecallClient:
        made.append(KvrecallClient(server.url, tenant=name))
        return made[-1]

    yield client
    for each in made:
        each.close()


def told(
    client: KvrecallClient, say: Any, first: int = 0, turns: int = TOLD, session: str = ""
) -> str:
    """A session with `turns` turns, each longer than the budget."""
    session = session or client.create_session(**SETTINGS).id
    for seed in range(first, first + turns):
        client.turn(session, [say.user(say.chatter(seed, 14))], **GREEDY)
    return session


def ask(client: KvrecallClient, session: str, say: Any) -> list[str]:
    """Replies to a question and to another one."""
    turns = [client.turn(session, [say.user(text)], **GREEDY) for text in (QUESTION, "And Ben's?")]
    return [turn.text for turn in turns]


def stored(server: Any) -> float:
    """Bytes of rows in the authoritative tier; the tiers above have copies.

    Redis is asked itself: its workers know each other's changes a few seconds later.
    """
    if server.workers == 1:
        return float(server.metric("kvrecall_tier_bytes", tier="nvme"))
    with redis.Redis.from_url(server.environment["KVRECALL_STORE__REDIS_URL"]) as client:
        pages = client.scan_iter("*:p:*", count=1000)
        # A page that is deleted expires within two minutes, any other one within days.
        return float(sum(client.strlen(page) for page in pages if client.ttl(page) > 600))


def test_a_fork_replies_like_its_parent_and_like_a_plain_session(
    client: KvrecallClient, say: Any
) -> None:
    parent = told(client, say)
    separate = told(client, say)
    child = client.fork(parent).id
    grandchild = client.fork(child).id
    expected = ask(client, separate, say)
    assert [ask(client, session, say) for session in (grandchild, child, parent)] == [expected] * 3
    of_child = client.memory(child)
    of_separate = client.memory(separate)
    for name in ("length", "active_rows", "evicted_rows", "promoted_rows"):
        assert getattr(of_child, name) == getattr(of_separate, name)


def test_a_fork_at_an_earlier_turn_replies_as_if_that_was_the_last_one(
    client: KvrecallClient, say: Any
) -> None:
    parent = told(client, say)
    separate = told(client, say, turns=2)
    child = client.fork(parent, 2)
    assert (child.turns, child.forked_from) == (2, ForkOrigin(parent, 2))
    assert child.length == client.get_session(separate).length
    told(client, say, 7, 1, child.id)
    told(client, say, 7, 1, separate)
    assert ask(client, client.fork(child.id).id, say) == ask(client, separate, say)
    assert client.get_session(parent).turns == TOLD


def test_a_fork_outlives_its_parent(client: KvrecallClient, say: Any) -> None:
    parent = told(client, say)
    separate = told(client, say)
    child = client.fork(parent).id
    client.delete_session(parent)
    with pytest.raises(KvrecallError, match="unknown_session"):
        client.get_session(parent)
    assert ask(client, child, say) == ask(client, separate, say)


def test_a_fork_in_a_pause_continues_with_another_result(client: KvrecallClient, say: Any) -> None:
    session = told(client, say, turns=1)
    client.turn(session, [say.user("Look it up."), say.asks("c1", what="locker")], generate=False)
    child = client.fork(session).id
    assert client.get_session(child).state in ("paused", "repairing")
    client.event(child, "tool_call.completed", "c1", result="The code is 4711.")
    client.event(session, "tool_call.completed", "c1", result="There is none.")
    assert client.turn(child, [], **GREEDY).turn == 3
    (heard,) = [call.id for call in client.get_session(session).pending_calls]
    assert heard == "c1"


def test_a_fork_stores_no_rows(server: Any, client: KvrecallClient, say: Any) -> None:
    nothing = stored(server)
    parent = told(client, say)
    before = stored(server)
    page = (before - nothing) / (client.get_session(parent).length // PAGE)
    children = [client.fork(parent).id for _ in range(5)]
    # The parent's pause may settle a page meanwhile.
    assert before <= stored(server) < before + 1.5 * page
    for child in children:
        client.delete_session(child)
    assert before <= stored(server) < before + 1.5 * page


def test_equal_prefixes_of_a_tenant_are_stored_once(server: Any, tenant: Any, say: Any) -> None:
    system = {"role": "system", "content": say.chatter(99, 16)}
    tools = [
        {"type": "function", "function": {"name": "look_up", "description": say.chatter(98, 3)}}
    ]

    def begin(client: KvrecallClient, name: str) -> tuple[float, str]:
        """Bytes that a session adds, and its id."""
        before = stored(server)
        session = client.create_session(
            budget=256, research={"repair_rows": 0}, seed=7, tools=tools
        ).id
        client.turn(session, [system, say.user(f"My name is {name}.")], **GREEDY)
        return stored(server) - before, session

    ann = tenant("ann")
    ben = tenant("ben")
    first, _ = begin(ann, "Ada")
    second, sharing = begin(ann, "Emma")
    others, alone = begin(ben, "Emma")
    # A page more or less: another name may begin another one, and pauses settle some meanwhile.
    assert second < min(first, others) / 2
    assert ask(ann, sharing, say) == ask(ben, alone, say)

    def rows_of(client: KvrecallClient, session: str) -> tuple[int, int]:
        memory = client.memory(session)
        return memory.length, memory.active_rows

    # An answer's tokens have their rows only once the pause has settled them.
    say.until(
        lambda: rows_of(ann, sharing) == rows_of(ben, alone),
        "both sessions hold the same rows",
        lambda: (rows_of(ann, sharing), rows_of(ben, alone)),
    )
    with pytest.raises(KvrecallError, match="unknown_session"):
        ben.get_session(sharing)


def test_a_session_outlives_the_writer_of_its_shared_prefix(
    server: Any, tenant: Any, say: Any
) -> None:
    system = {"role": "system", "content": say.chatter(97, 8)}
    client = tenant("cleo")
    before = stored(server)

    def begin() -> str:
        session = client.create_session(**SETTINGS).id
        client.turn(session, [system, say.user("Hello.")], **GREEDY)
        return session

    first = begin()
    second = begin()
    third = begin()
    client.delete_session(first)
    expected = ask(client, second, say)
    assert ask(client, third, say) == expected
    client.delete_session(second)
    client.delete_session(third)
    say.until(lambda: stored(server) == before, "the sweep has deleted what they shared")


def test_after_kills_among_forks_and_deletions_nothing_is_leaked(
    new_server: Callable[..., Any], say: Any
) -> None:
    server = new_server()
    server.start()
    parent = told(server.own, say)
    separate = told(server.own, say)
    expected = ask(server.own, separate, say)
    for _ in range(2):
        kill_among_forks(server, parent, say)
    sessions = [view.id for view in server.own.list_sessions(200).sessions]
    forks = [session for session in sessions if session not in (parent, separate)]
    assert len(forks) >= 6
    server.own.delete_session(parent)
    server.kill()
    server.start()
    assert ask(server.own, forks[-1], say) == expected
    for session in (*forks, separate):
        server.own.delete_session(session)
    assert server.metric("kvrecall_tier_bytes") == 0
    server.kill()
    server.start()
    assert server.metric("kvrecall_tier_bytes") == 0
    say.until(lambda: on_disk(server) < 1 << 16, "the end of the files")
    assert server.own.list_sessions().sessions == ()


def on_disk(server: Any) -> int:
    """Bytes of the segment files."""
    return sum(path.stat().st_size for path in (server.data / "pages").rglob("*") if path.is_file())


def kill_among_forks(server: Any, parent: str, say: Any) -> None:
    """Kill the server while a session is forked repeatedly, and start it again."""
    known = len(server.own.list_sessions(200).sessions)
    ended: list[str] = []
    forking = threading.Thread(
        target=lambda: ended.append(fork_and_delete(server.client(), parent))
    )
    forking.start()
    say.until(lambda: len(server.own.list_sessions(200).sessions) > known + 3, "forks")
    server.kill()
    forking.join()
    assert ended == ["connection_failed"]
    server.start()


def fork_and_delete(client: KvrecallClient, parent: str) -> str:
    """Fork a session, sometimes at an earlier turn, and delete every third fork, until an error."""
    for number in count():
        try:
            child = client.fork(parent, 2 if number % 4 == 3 else None).id
            if number % 3 == 1:
                client.delete_session(child)
        except KvrecallError as error:
            return error.code
    raise AssertionError("counting does not end")
