"""Answers that select their rows anew, in killed, moved and forked sessions of real processes.

Replies are compared with those of a twin: an undisturbed session with the same settings and turns.
"""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvrecall.client import KvrecallClient, KvrecallError, TextDelta, Turn, TurnCompleted

Json = dict[str, Any]
SETTINGS: Json = {
    "budget": 128,
    "research": {
        "repair_rows": 32,
        "repair_on": ["turn"],
        "method": "loopserve",
        "method_settings": {"window": 16},
        "reselect": {"every": 4},
    },
    "seed": 31,
}
LONG: Json = {"max_tokens": 120, "stop": ["<tool_call>"]}


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Two workers behind a gateway."""
    cluster = new_cluster()
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def client(cluster: Any) -> KvrecallClient:
    own: KvrecallClient = cluster.own
    return own


def tell(client: KvrecallClient, say: Any, turns: int = 2) -> str:
    """A session of some turns, rows of which are evicted."""
    session = client.create_session(**SETTINGS)
    assert session.research.reselect is not None
    for part in range(turns):
        turn = client.turn(session.id, [say.user(say.chatter(600 + part, 25))], **LONG)
    assert turn.memory.evicted_rows
    return session.id


def go_on(client: KvrecallClient, session: str, say: Any) -> Turn:
    return client.turn(session, [say.user("Go on.")], **LONG)


def substance(turn: Turn) -> Json:
    """A turn's result without ids and times."""
    assert turn.reselections is not None
    moved = turn.reselections
    return {
        "message": turn.message,
        "usage": turn.usage,
        "rows": (turn.memory.length, turn.memory.active_rows, turn.memory.evicted_rows),
        "reselections": (moved.count, moved.rows_in, moved.rows_out),
    }


def test_a_kill_in_the_middle_of_a_re_selected_answer_is_not_heard(
    cluster: Any, client: KvrecallClient, say: Any
) -> None:
    """The answer goes on in the other worker; the turn after it shows the committed selection."""
    session, twin = tell(client, say), tell(client, say)
    expected = go_on(client, twin, say)
    assert expected.reselections is not None
    assert expected.reselections.count > 2
    assert expected.reselections.rows_in > 0
    owner = cluster.owner(session)
    stream = client.stream(session, [say.user("Go on.")], **LONG)
    deltas = [next(stream) for _ in range(10)]
    owner.end(signal.SIGKILL)
    *rest, last = stream
    text = "".join(each.text for each in [*deltas, *rest] if isinstance(each, TextDelta))
    assert text == expected.text
    assert isinstance(last, TurnCompleted)
    assert substance(last.turn) == substance(expected)
    assert cluster.owner(session) is not owner
    assert substance(go_on(client, session, say)) == substance(go_on(client, twin, say))
    cluster.back()


def test_a_moved_session_and_forks_at_any_turn_say_what_an_undisturbed_one_says(
    cluster: Any, client: KvrecallClient, say: Any
) -> None:
    session, twin = tell(client, say, turns=3), tell(client, say, turns=3)
    early = tell(client, say)
    expected = substance(go_on(client, twin, say))
    moved = client.move(session)
    assert moved.research.reselect == client.get_session(twin).research.reselect
    child = client.fork(session).id
    assert substance(go_on(client, session, say)) == expected
    assert substance(go_on(client, child, say)) == expected
    assert client.inspect.turns(session).turns[-1].reselections is not None
    before = client.fork(session, 2).id
    assert substance(go_on(client, before, say)) == substance(go_on(client, early, say))


def test_a_killed_server_continues_from_the_re_selected_rows(new_server: Any, say: Any) -> None:
    server = new_server()
    server.start()
    session, twin = tell(server.own, say), tell(server.own, say)
    expected = [substance(go_on(server.own, twin, say)) for _ in range(2)]
    assert substance(go_on(server.own, session, say)) == expected[0]
    assert server.metric("kvrecall_worker_reselected_rows_total") > 0
    stream = server.own.stream(session, [say.user("Go on.")], key="again", **LONG)
    for _ in range(8):
        next(stream)
    server.kill()
    with pytest.raises(KvrecallError):
        list(stream)
    server.start()
    again = server.own.turn(session, [say.user("Go on.")], key="again", **LONG)
    assert substance(again) == expected[1]
    server.kill()


def test_a_method_that_keeps_every_row_is_refused(cluster: Any, client: KvrecallClient) -> None:
    research = SETTINGS["research"] | {"method": "full", "method_settings": {}}
    with pytest.raises(KvrecallError, match="keeps every row"):
        client.create_session(**{**SETTINGS, "research": research})
