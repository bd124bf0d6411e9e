"""Those who watch: two gateways on one Redis, and a real model's memory seen from outside."""

import base64
import signal
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest

from kvrecall.client import (
    AsyncKvrecallClient,
    KvrecallClient,
    PastRepair,
    WatchEvent,
    WatchStream,
)

WAIT_SECONDS = 120


class Watcher:
    """Reads a stream in a thread of its own."""

    def __init__(self, stream: WatchStream) -> None:
        self._stream = stream
        self._events: Queue[WatchEvent | None] = Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._stream:
                self._events.put(event)
        finally:
            self._events.put(None)

    def read(self) -> WatchEvent | None:
        """Wait for an event; None at the end."""
        return self._events.get(timeout=WAIT_SECONDS)

    def read_until(self, name: str, **fields: Any) -> list[WatchEvent]:
        """Read up to the first event with this name and these fields."""
        found: list[WatchEvent] = []
        while True:
            event = self.read()
            assert event is not None, f"the stream ended before {name}: {found}"
            found.append(event)
            if event.name == name and fields.items() <= event.data.items():
                return found


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Two workers behind two gateways."""
    cluster = new_cluster(KVRECALL_SERVICE__DEFAULT_MAX_TOKENS="8")
    cluster.start(gateways=2)
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def other(cluster: Any) -> Iterator[KvrecallClient]:
    """A client of the second gateway."""
    with KvrecallClient(cluster.gateways[1].address, timeout_seconds=300.0) as other:
        yield other


def wait_for_relay(client: KvrecallClient, other: KvrecallClient) -> None:
    """Create sessions at one gateway until the other sees one: it has to subscribe first."""
    watcher = Watcher(other.inspect.watch())
    watcher.read()
    seen = threading.Event()

    def create() -> None:
        while not seen.is_set():
            client.delete_session(client.create_session(budget=64))

    creating = threading.Thread(target=create)
    creating.start()
    watcher.read_until("created")
    seen.set()
    creating.join()


def test_a_turn_through_one_gateway_is_seen_at_the_other(
    cluster: Any, other: KvrecallClient, say: Any
) -> None:
    client: KvrecallClient = cluster.own
    wait_for_relay(client, other)
    session = client.create_session(
        budget=64, research={"method": "snapkv", "repair_rows": 16, "repair_on": ["tool_call"]}
    )
    with other.inspect.watch(session) as stream:
        watcher = Watcher(stream)
        first = watcher.read()
        assert first is not None
        assert (first.name, first.data["turns"]) == ("snapshot", 0)
        client.turn(session, [say.user(say.chatter(1, 8))], generate=False)
        turn = client.turn(
            session, [say.user("Look it up."), say.asks("c1", name="Ada")], generate=False
        )
        events = watcher.read_until("turn", turn=2, status="committed")
        committed = [event.data for event in events if event.name == "turn"][-1]
        assert committed["length"] == turn.memory.length
        events = watcher.read_until("repair", status="committed")
        assert [each.data["call"] for each in events if each.name == "repair"] == ["c1", "c1"]
        client.event(session, "tool_call.completed", "c1", result="a secret")
        reported = watcher.read_until("call")[-1]
        assert reported.data["status"] == "completed"
        moved = client.move(session)
        assert watcher.read_until("moved")[-1].data["worker"] == moved.worker
        client.delete_session(session)
        events = watcher.read_until("deleted")
        assert watcher.read() is None
        assert all("secret" not in str(event) for event in events)


def test_a_gateway_that_stops_ends_its_streams(cluster: Any, other: KvrecallClient) -> None:
    watcher = Watcher(other.inspect.watch())
    watcher.read()
    cluster.gateways[1].end(signal.SIGTERM)
    while watcher.read() is not None:
        pass
    cluster.gateways[1].start()


def repair_in_a_pause(client: KvrecallClient, say: Any) -> tuple[str, PastRepair, set[int]]:
    """A session that waits for a tool, its repair, and the positions that this brought back."""
    session = client.create_session(
        budget=64,
        research={
            "method": "snapkv",
            "repair_rows": 16,
            "repair_on": ["tool_call"],
            "layer_budgets": "uniform",
        },
    ).id
    for seed in range(4):
        client.turn(session, [say.user(say.chatter(seed, 6))], generate=False)
    client.turn(
        session, [say.user("Where is it?"), say.asks("c1", name="Ada's locker")], generate=False
    )
    say.until(lambda: bool(client.repairs(session)), "a repair")
    (repair,) = client.repairs(session)
    promoted = {at for passage in repair.passages for at in range(passage.start, passage.stop)}
    assert promoted
    return session, repair, promoted


def test_the_map_shows_what_a_repair_brought_back(shared_server: Any, say: Any) -> None:
    client: KvrecallClient = shared_server.own
    session, repair, promoted = repair_in_a_pause(client, say)
    found = client.inspect.memory_map(session, columns=2000)
    length = client.get_session(session).length
    assert (found.length, found.turns, found.repairs) == (length, 5, 1)
    assert len(found.layers) == client.worker().layers
    brought = set[int]()
    for cells in found.layers:
        active, shown = base64.b64decode(cells.active), base64.b64decode(cells.promoted)
        # A column for each token, as there are fewer than columns.
        assert len(active) == found.length
        brought |= {at for at, byte in enumerate(shown) if byte}
        assert all(active[at] for at in promoted)
    assert brought == promoted, "each in the layers that had evicted it"
    (pause,) = client.inspect.pauses(session)
    assert (pause.turn, pause.open, pause.repairs[0].promoted) == (5, True, repair.promoted)
    assert client.inspect.overview().totals.turns >= 5
    result = {"role": "tool", "tool_call_id": "c1", "content": "Number 7."}
    client.turn(session, [result], generate=False)
    assert client.inspect.memory_map(session, columns=2000).length > found.length


def test_the_tokens_show_what_a_repair_brought_back(shared_server: Any, say: Any) -> None:
    client: KvrecallClient = shared_server.own
    session, repair, promoted = repair_in_a_pause(client, say)
    length = client.get_session(session).length
    memory = client.memory(session)
    tokens = [
        token
        for start in range(0, length, 512)
        for token in client.inspect.memory_tokens(session, start, start + 512).tokens
    ]
    assert [token.position for token in tokens[:length]] == list(range(length))
    heads = client.worker().kv_heads
    for layer, rows in enumerate(memory.layer_active_rows):
        held = sum(len(token.get_heads(layer)) for token in tokens)
        assert -(-held // heads) == rows
    fully = sum(token.rows == token.rows_total for token in tokens)
    pending = sum(token.reason == "pending" for token in tokens)
    assert length - fully - pending == memory.evicted_rows
    assert repair.call_id == "c1"
    assert all(token.repair == repair.number for token in tokens if token.position in promoted)
    assert all(token.rows == 0 for token in tokens if token.reason == "evicted")
    assert {"sink", "recent", "promoted", "evicted", "kept"} <= {token.reason for token in tokens}
    assert tokens[0].reason == "sink"
    log = client.inspect.turns(session)
    assert [turn.stop for turn in log.turns[:-1]] == [turn.start for turn in log.turns[1:]]
    assert log.turns[-1].stop == length
    ids = [token.turn for token in tokens]
    assert ids == sorted(ids)


def test_a_generated_answer_has_tokens_that_are_not_computed_yet(
    shared_server: Any, say: Any
) -> None:
    client: KvrecallClient = shared_server.own
    session = client.create_session(budget=64)
    client.turn(session, "Hello, how are you?", max_tokens=4)
    log = client.inspect.turns(session)
    found = client.inspect.memory_tokens(session)
    assert found.log_length == log.turns[0].stop == len(found.tokens)
    pending = [token for token in found.tokens if token.reason == "pending"]
    assert len(pending) >= found.log_length - found.length > 0
    assert all(token.rows == 0 and token.turn == 1 for token in pending)
    client.turn(session, "And you?", max_tokens=4)
    again = client.inspect.turns(session, after=1)
    assert again.turns[0].start == log.turns[0].stop


async def test_the_async_client_looks_into_sessions_too(shared_server: Any, say: Any) -> None:
    async with AsyncKvrecallClient(shared_server.url, timeout_seconds=300.0) as client:
        session = await client.create_session(budget=64, metadata={"name": "looked into"})
        async with client.inspect.watch(session) as stream:
            assert (await anext(stream)).name == "snapshot"
            await client.turn(session, [say.user(say.chatter(5, 6))], generate=False)
            event = await anext(stream)
            assert (event.name, event.session, event.data["turn"]) == ("turn", session.id, 1)
        assert [turn.turn for turn in (await client.inspect.turns(session)).turns] == [1]
        assert (await client.inspect.memory_map(session)).columns > 0
        assert (await client.inspect.memory_tokens(session, 0, 2)).tokens[0].reason == "sink"
        assert (await client.inspect.family(session)).root == session.id
        assert await client.inspect.pauses(session) == ()
        assert (await client.inspect.version()).model == (await client.worker()).model
        assert (await client.inspect.overview()).sessions > 0
        page = await client.list_sessions(q="looked into", order="updated")
        assert [found.id for found in page.sessions] == [session.id]
