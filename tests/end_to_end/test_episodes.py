"""Episodes of a served session: built in the background, selected by a turn's topic, persistent."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.client import TurnEpisode

TOPICS = {
    "garden": (
        "Anna plants roses and tulips in the garden.",
        "The garden soil needs water and the seeds need sun.",
    ),
    "train": (
        "The train leaves from the station platform.",
        "Ben has a ticket for the train carriage.",
    ),
}
EPISODES = {"count": 2}

Server = Any


def recorded(topic: str, number: int) -> list[dict[str, str]]:
    """A question and an answer about a topic."""
    first, second = TOPICS[topic]
    return [
        {"role": "user", "content": f"{first} Number {number}."},
        {"role": "assistant", "content": second},
    ]


@pytest.fixture(scope="module")
def own_server(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server of this module, which tests may kill."""
    server = new_server(KVRECALL_SERVICE__DEFAULT_MAX_TOKENS="4")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def session(own_server: Server, say: SimpleNamespace) -> str:
    """A session with long passages on two topics, and an episode of each."""
    client = own_server.own
    created = client.create_session(
        budget=64, research={"repair_rows": 16, "method": "epicache", "episodes": EPISODES}, seed=7
    )
    # In one turn, so that one build has them all: it takes 3 segments more to be repeated.
    passages = [
        message
        for number in range(24)
        for message in recorded(("garden", "train")[number // 6 % 2], number)
    ]
    client.turn(created.id, passages, generate=False)
    say.until(lambda: bool(client.episodes(created.id).episodes), "a set of episodes")
    return created.id


def ask(server: Server, session: str, text: str) -> TurnEpisode:
    """Send a turn about a topic and return its episode."""
    turn = server.own.turn(session, [{"role": "user", "content": text}])
    memory = server.own.memory(session)
    pairs = zip(memory.layer_peak_rows, memory.layer_bound_rows, strict=True)
    assert all(peak <= bound for peak, bound in pairs)
    assert turn.memory.active_rows > 0
    assert turn.episode is not None
    return turn.episode


def test_each_topic_is_an_episode(own_server: Server, session: str) -> None:
    found = own_server.own.episodes(session)
    garden, train = found.episodes
    assert (found.segments, garden.segments, train.segments) == (12, 6, 6)
    assert "garden" in garden.medoid
    assert "train" in train.medoid
    assert garden.tokens + train.tokens == own_server.own.memory(session).length


def test_a_turn_switches_only_for_another_topic(own_server: Server, session: str) -> None:
    client = own_server.own
    moved = own_server.metric("kvrecall_episode_moved_bytes_total")
    first = ask(own_server, session, "What about the train ticket and the station?")
    again = ask(own_server, session, "Which platform does the train leave from?")
    other = ask(own_server, session, "Which seeds are in the garden soil?")
    garden, train = (episode.id for episode in client.episodes(session).episodes)
    assert [told.episode for told in (first, again, other)] == [train, train, garden]
    assert [told.switched for told in (first, again, other)] == [True, False, True]
    assert (again.rows_moved, again.bytes_moved) == (0, 0)
    worker = client.worker()
    row = first.bytes_moved // first.rows_moved
    assert row % (2 * worker.head_dim) == 0
    held = 64 * worker.layers * worker.kv_heads
    assert 0 < first.rows_moved <= held
    assert other.bytes_moved == row * other.rows_moved > 0
    assert (
        own_server.metric("kvrecall_episode_moved_bytes_total") - moved
        == first.bytes_moved + other.bytes_moved
    )
    matched = {
        episode.id: (episode.matched, episode.active)
        for episode in client.episodes(session).episodes
    }
    assert matched == {garden: (1, True), train: (2, False)}


def test_episodes_outlive_the_process(own_server: Server, session: str) -> None:
    before = own_server.own.episodes(session)
    active = next(episode.id for episode in before.episodes if episode.active)
    own_server.kill()
    own_server.start()
    assert own_server.own.episodes(session) == before
    stayed = ask(own_server, session, "The roses in the garden, and the seeds?")
    assert (stayed.episode, stayed.switched) == (active, False)
    assert ask(own_server, session, "Ben's train ticket?").switched


def test_a_build_by_prefill_creates_episodes_too(own_server: Server, say: SimpleNamespace) -> None:
    client = own_server.own
    episodes = {**EPISODES, "build": "per_episode"}
    session = client.create_session(
        budget=64,
        research={
            "repair_rows": 0,
            "method": "epicache",
            "method_settings": {"rank": "attention"},
            "episodes": episodes,
        },
    ).id
    for number in range(8):
        client.turn(session, recorded(("garden", "train")[number // 2 % 2], number), generate=False)
    say.until(lambda: bool(client.episodes(session).episodes), "a set of episodes")
    told = ask(own_server, session, "What about the train ticket and the station?")
    assert told.switched
    assert "train" in client.episodes(session).episodes[1].medoid
    assert told.episode == client.episodes(session).episodes[1].id
