"""Two gateways and two workers on one Redis.

Killed, stopped and drained workers, unnoticed by clients.

Replies are compared with those of a twin: an undisturbed session with the same settings and turns.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from kvrecall.client import KvrecallClient, TextDelta, Turn, TurnCompleted, TurnStream

Json = dict[str, Any]
SETTINGS: Json = {
    "budget": 128,
    "research": {"method": "snapkv", "repair_rows": 32, "repair_on": ["tool_call", "tool_result"]},
    "seed": 23,
}
GREEDY: Json = {"max_tokens": 12, "stop": ["<tool_call>"]}
ROWS = ("length", "active_rows", "evicted_rows", "promoted_rows")


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Two workers behind two gateways."""
    cluster = new_cluster(
        KVRECALL_SERVICE__MAX_OUTPUT_TOKENS="4000", KVRECALL_SERVER__DRAIN_SECONDS="300"
    )
    cluster.start(gateways=2)
    yield cluster
    cluster.kill()


@pytest.fixture(autouse=True)
def whole(cluster: Any) -> Iterator[None]:
    """Restore both workers after each test."""
    yield
    cluster.back()


@pytest.fixture
def client(cluster: Any) -> KvrecallClient:
    own: KvrecallClient = cluster.own
    return own


@pytest.fixture(scope="module")
def other_client(cluster: Any) -> Iterator[KvrecallClient]:
    """A client of the second gateway."""
    with KvrecallClient(cluster.gateways[1].address, timeout_seconds=300.0) as other:
        yield other


def substance(turn: Turn) -> Json:
    """A turn's result without ids and times."""
    return {
        "message": turn.message,
        "usage": turn.usage,
        "rows": {name: getattr(turn.memory, name) for name in ROWS},
    }


@pytest.fixture
def begin(client: KvrecallClient, say: Any) -> Callable[[int], str]:
    """begin(seed): a session of two turns, the words of which follow from the seed.

    Rows of it are evicted.
    """

    def start(seed: int) -> str:
        session = client.create_session(**SETTINGS).id
        for part in (0, 1):
            turn = client.turn(session, [say.user(say.chatter(100 * seed + part, 20))], **GREEDY)
            assert turn.durable
        assert turn.memory.evicted_rows
        return session

    return start


@pytest.fixture
def ask(say: Any) -> Callable[[KvrecallClient, str], Json]:
    """Run one more turn; returns its result."""

    def turn(client: KvrecallClient, session: str) -> Json:
        return substance(
            client.turn(session, [say.user("What is the code of Ada's locker?")], **GREEDY)
        )

    return turn


def heard(stream: TurnStream) -> tuple[str, Turn]:
    """Read a stream to its end; returns its text and its turn."""
    *events, last = stream
    assert isinstance(last, TurnCompleted), last
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.turn


def test_a_deleted_session_is_deleted_from_every_worker(
    cluster: Any, client: KvrecallClient, begin: Any, say: Any
) -> None:
    """The first test: pages of a turn that was cut off stay until the sweep takes them, or they expire."""
    session = begin(9)
    cluster.http.post(f"/v1/sessions/{session}/move", json={}).raise_for_status()
    assert cluster.metric("kvrecall_shared_tier_bytes") > 0
    client.delete_session(session)
    for tiers in ("tier_bytes", "shared_tier_bytes"):
        say.until(lambda name=tiers: cluster.metric(f"kvrecall_{name}") == 0, f"{tiers} of 0")
    assert cluster.metric("kvrecall_worker_sessions") == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_turn_whose_worker_dies_is_completed_by_another(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any, say: Any, end: signal.Signals
) -> None:
    session = begin(1)
    twin = begin(1)
    long: Json = {"max_tokens": 150, "stop": ["<tool_call>"]}
    expected = client.turn(twin, [say.user("Go on.")], **long)
    owner = cluster.owner(session)
    stream = client.stream(session, [say.user("Go on.")], **long)
    deltas = [next(stream) for _ in range(5)]
    texts = [delta.text for delta in deltas if isinstance(delta, TextDelta)]
    assert len(texts) == len(deltas)
    received = "".join(texts)
    process = owner.running
    if end is signal.SIGKILL:
        owner.end(end)
    else:
        process.send_signal(end)
    try:
        rest, done = heard(stream)
    finally:
        process.send_signal(signal.SIGCONT)
    assert received + rest == expected.text
    assert substance(done) == substance(expected)
    assert cluster.owner(session) is not owner
    assert ask(client, session) == ask(client, twin)
    assert cluster.metric("kvrecall_turn_retries_total") > 0


def test_a_session_whose_worker_died_while_idle_continues(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any
) -> None:
    session = begin(2)
    twin = begin(2)
    expected = ask(client, twin)
    cluster.owner(session).end(signal.SIGKILL)
    assert ask(client, session) == expected


def test_without_any_worker_a_turn_is_refused_until_one_is_back(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any, say: Any
) -> None:
    session = begin(3)
    twin = begin(3)
    expected = ask(client, twin)
    for process in cluster.of_name.values():
        process.end(signal.SIGKILL)
    answer = cluster.http.post(f"/v1/sessions/{session}/turns", json={"messages": []})
    assert answer.status_code in (422, 503)
    assert not client.ready()
    say.until(lambda: cluster.metric("kvrecall_worker_up") == 0, "both workers down")
    cluster.back()
    assert client.ready()
    assert ask(client, session) == expected


def test_a_draining_worker_completes_its_turn_and_its_sessions_move(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any, say: Any
) -> None:
    session = begin(4)
    twin = begin(4)
    long: Json = {"max_tokens": 150, "stop": ["<tool_call>"]}
    expected = client.turn(twin, [say.user("Go on.")], **long)
    owner = cluster.owner(session)
    name = client.get_session(session).worker
    stream = client.stream(session, [say.user("Go on.")], **long)
    assert isinstance(next(stream), TextDelta)
    codes: list[int] = []
    ending = threading.Thread(target=lambda: codes.append(owner.end(signal.SIGTERM)))
    ending.start()
    _, done = heard(stream)
    ending.join()
    assert (codes, substance(done)) == ([0], substance(expected))
    assert client.get_session(session).worker == name
    assert ask(client, session) == ask(client, twin)
    assert client.get_session(session).worker != name


def test_a_session_moves_without_being_recomputed(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any
) -> None:
    session = begin(5)
    twin = begin(5)
    before = client.get_session(session)
    moved = client.move(session)
    assert moved.worker != before.worker
    assert moved.length == before.length
    assert ask(client, session) == ask(client, twin)
    assert client.move(session, before.worker).worker == before.worker
    assert ask(client, session) == ask(client, twin)
    assert cluster.metric("kvrecall_worker_rebuilt_pages_total") == 0


def test_two_gateways_take_turns_in_a_session(
    client: KvrecallClient, other_client: KvrecallClient, begin: Any, ask: Any, say: Any
) -> None:
    session = begin(6)
    twin = begin(6)
    asking = [
        say.user("Which code opens the locker of Ada?"),
        say.asks("c1", name="Ada", thing="locker"),
    ]
    for who, other in ((client, other_client), (other_client, client)):
        assert ask(who, session) == ask(client, twin)
        who.turn(session, asking, generate=False)
        other.event(
            session, "tool_call.completed", call_id="c1", result="Ada's locker has number 4821."
        )
        client.turn(twin, asking, generate=False)
        client.event(
            twin, "tool_call.completed", call_id="c1", result="Ada's locker has number 4821."
        )
        results = [
            substance(at.turn(each, [], **GREEDY, wait_for_repairs=True))
            for at, each in ((who, session), (client, twin))
        ]
        assert results[0] == results[1]
        assert results[0]["rows"]["evicted_rows"]


def test_a_session_whose_gateway_died_within_a_turn_continues_at_the_other(
    cluster: Any,
    client: KvrecallClient,
    other_client: KvrecallClient,
    begin: Any,
    ask: Any,
    say: Any,
) -> None:
    session = begin(7)
    twin = begin(7)
    with KvrecallClient(cluster.gateways[1].address, timeout_seconds=300.0) as dying:
        stream = dying.stream(session, [say.user("Go on.")], max_tokens=3000)
        assert isinstance(next(stream), TextDelta)
        cluster.gateways[1].end(signal.SIGKILL)
    assert ask(client, session) == ask(client, twin)
    cluster.gateways[1].start()


def test_lost_rows_are_rebuilt_from_the_turn_log(
    cluster: Any, client: KvrecallClient, begin: Any, ask: Any, redis_url: str
) -> None:
    session = begin(8)
    twin = begin(8)
    expected = ask(client, twin)
    cluster.owner(session).end(signal.SIGKILL)
    namespace = cluster.environment["KVRECALL_STORE__REDIS_NAMESPACE"]
    with redis.Redis.from_url(redis_url) as connection:
        rows = list(connection.scan_iter(f"{namespace}:*:p:*", 1000))
        assert rows
        connection.delete(*rows)
    assert ask(client, session) == expected
    assert cluster.metric("kvrecall_rebuild_seconds_count") == 1


def test_the_workers_report_their_load(cluster: Any, say: Any) -> None:
    reported = [(name, each.address, 2, False) for name, each in cluster.of_name.items()]

    def report() -> list[tuple[Any, ...]]:
        workers = cluster.http.get("/v1/workers").raise_for_status().json()["workers"]
        parts = ("name", "address", "slots", "draining")
        return [tuple(each[part] for part in parts) for each in workers]

    # A gateway disconnects a worker that is slow to answer, as on a busy machine; it joins again.
    say.until(lambda: report() == reported, f"{reported}", report)
