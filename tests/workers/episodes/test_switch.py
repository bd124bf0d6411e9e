"""An episode is a list of rows; switching to it moves only the rows that are not active yet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.domain.episodes import NO_EPISODE, ActiveEpisode
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.selection import Selection
from workers.engine.session import WorkerSession
from workers.episodes.rows import EpisodeRows
from workers.episodes.switch import read_episode, switch
from workers.errors import BadEpisode

BUDGET = 40


@pytest.fixture
def talked(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> Callable[..., tuple[Any, WorkerSession]]:
    """talked(turns, recent, **spec).

    A worker with session "s", budget 40, resident, with words of a turn.
    """

    def make(turns: int = 1, recent: int = 0, **spec: Any) -> tuple[Any, WorkerSession]:
        worker = make_worker(block_tokens=64, recent=recent)
        worker.open(**{"method": "snapkv", "budget": BUDGET, "layer_budgets": "uniform"} | spec)
        for turn in range(turns):
            worker.turn("s", words(150, seed=turn), generate=False)
        return worker, worker.engine.session("s")

    return make


def make_episode(
    session: WorkerSession, heads: list[list[list[int]]], name: str = "e", **fields: Any
) -> pb.Episode:
    """An episode of the rows `heads[layer][head]`; later positions have higher scores."""
    positions = [_padded(rows) for rows in heads]
    rows = EpisodeRows.from_selection(positions, [p.clamp(min=0).float() for p in positions])
    columns: dict[str, Any] = {"length": session.length, "patched_prompt": [5, 6, 7]} | fields
    return pb.Episode(id=name, rows=rows.to_bytes(), **columns)


def _padded(heads: list[list[int]]) -> Tensor:
    width = max(map(len, heads))
    return torch.tensor(
        [sorted(head) + [-1] * (width - len(head)) for head in heads], dtype=torch.int64
    )


def everywhere(*positions: int) -> list[list[list[int]]]:
    """The same rows in both heads of both layers."""
    return [[list(positions)] * 2] * 2


def switched(worker: Any, session: WorkerSession, episode: pb.Episode) -> pb.SwitchReport:
    """Switch and check every invariant."""
    rows = read_episode(worker.engine, session, episode)
    report = switch(worker.engine, worker.engine.resident("s"), episode, rows)
    worker.check()
    return report


def active(worker: Any, session: WorkerSession) -> list[list[list[int]]]:
    """Positions that are active, per layer and head."""
    assert session.slot is not None
    held = Selection.from_slot(worker.engine.cache, session.slot).positions
    return [[[p for p in head if p != EMPTY] for head in layer.tolist()] for layer in held]


# Form


def test_an_episode_survives_the_wire() -> None:
    rows = EpisodeRows.from_selection(
        [torch.tensor([[1, 5], [2, -1]]), torch.zeros(2, 0, dtype=torch.int64)],
        [torch.tensor([[0.2, 0.4], [0.1, 9.0]]), torch.zeros(2, 0)],
    )
    back = EpisodeRows.from_bytes(rows.to_bytes())
    assert [p.tolist() for p in back.positions] == [[[1, 5], [2, EMPTY]], [[], []]]
    assert back.positions[0].dtype == torch.int32
    assert back.scores[0].dtype == torch.float16
    torch.testing.assert_close(back.scores[0].float(), torch.tensor([[0.5, 1.0], [0.25, 0.0]]))
    assert back.row_count() == 3


def test_scores_too_small_for_half_precision_keep_their_order() -> None:
    rows = EpisodeRows.from_selection(
        [torch.tensor([[0, 1, 2]])], [torch.tensor([[1e-9, 3e-9, 2e-9]])]
    )
    assert rows.scores[0].argsort().tolist() == [[0, 2, 1]]


@pytest.mark.parametrize(
    "data", [b"", b"nothing of the kind", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "]
)
def test_bytes_that_are_no_episode_are_refused(data: bytes, talked: Callable[..., Any]) -> None:
    worker, session = talked()
    with pytest.raises(BadEpisode):
        read_episode(worker.engine, session, pb.Episode(id="e", rows=data, length=3))


def test_an_episode_that_does_not_fit_its_session_is_refused(talked: Callable[..., Any]) -> None:
    worker, session = talked()
    length = session.length
    read = read_episode
    with pytest.raises(BadEpisode, match="build it again"):
        read(worker.engine, session, make_episode(session, everywhere(1), length=length + 1))
    with pytest.raises(BadEpisode, match="2 layers of 2 KV heads"):
        read(worker.engine, session, make_episode(session, [[[1]] * 2] * 3))
    with pytest.raises(BadEpisode, match="2 layers of 2 KV heads"):
        read(worker.engine, session, make_episode(session, [[[1]] * 3] * 2))
    with pytest.raises(BadEpisode, match=r"rows 0\.\."):
        read(worker.engine, session, make_episode(session, everywhere(length)))
    with pytest.raises(BadEpisode, match="each once"):
        read(worker.engine, session, make_episode(session, everywhere(3, 3)))
    with pytest.raises(BadEpisode, match=f"the {BUDGET} rows per head"):
        read(worker.engine, session, make_episode(session, everywhere(*range(BUDGET + 1))))


# Switching


def test_a_switch_makes_exactly_the_episodes_rows_active_bit_by_bit(
    talked: Callable[..., Any],
) -> None:
    worker, session = talked()
    wanted = [[[0, 3, 50], [7]], [list(range(20, 60)), [1, 2, 90, 91, 92]]]
    report = switched(worker, session, make_episode(session, wanted))
    assert active(worker, session) == wanted
    assert session.episode == ActiveEpisode("e", (5, 6, 7))
    rows = worker.engine.store.gather("s", torch.arange(session.length))
    for layer, heads in enumerate(wanted):
        keys, values, _ = worker.engine.cache.get_rows(session.slot, layer)
        for head, kept in enumerate(heads):
            assert torch.equal(keys[head, : len(kept)], rows[layer, 0, head, kept])
            assert torch.equal(values[head, : len(kept)], rows[layer, 1, head, kept])
    assert report.rows_moved + report.rows_kept == 49


def test_sharing_80_percent_moves_20_percent_of_the_bytes(
    talked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, session = talked()
    switched(worker, session, make_episode(session, everywhere(*range(0, 80, 2)), "first"))
    asked: list[int] = []
    gather = worker.engine.store.gather_selection

    def counting(name: str, selection: list[Tensor]) -> Any:
        asked.append(sum(int((positions >= 0).sum()) for positions in selection))
        return gather(name, selection)

    monkeypatch.setattr(worker.engine.store, "gather_selection", counting)
    other = [*range(0, 64, 2), *range(81, 97, 2)]
    report = switched(worker, session, make_episode(session, everywhere(*other), "second"))
    of_all = 4 * len(other)
    assert (report.rows_moved, report.rows_kept) == (0.2 * of_all, 0.8 * of_all)
    assert asked == [report.rows_moved], "rows that are active are not read"
    whole = of_all * worker.engine.model.shape.row_bytes(worker.engine.model.dtype)
    assert report.bytes_moved == 0.2 * whole
    assert worker.memory().active_bytes == whole


def test_the_same_episode_again_moves_nothing(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, session = talked()
    episode = make_episode(session, everywhere(*range(60, 100)))
    assert switched(worker, session, episode).rows_moved > 150
    again = switched(worker, session, episode)
    assert (again.rows_moved, again.bytes_moved, again.rows_kept) == (0, 0, 160)
    worker.turn("s", words(20, seed=5), generate=False)
    before = active(worker, session)
    assert switched(worker, session, episode).rows_moved == 0, (
        "what a turn evicted was evicted for something newer"
    )
    assert active(worker, session) == before


def test_newer_rows_stay_active_with_the_episodes(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The newest of them, in at most half of the rows; they replace the episode's lowest scores."""
    worker, session = talked(recent=8)
    episode = make_episode(session, everywhere(*range(60, 100)))
    worker.turn("s", words(60, seed=5), generate=False)
    newer = [
        [[p for p in head if p >= episode.length] for head in layer]
        for layer in active(worker, session)
    ]
    switched(worker, session, episode)
    for layer, expected in zip(active(worker, session), newer, strict=True):
        for head, came in zip(layer, expected, strict=True):
            assert came, "the recent window is newer"
            kept = came[-BUDGET // 2 :]
            assert head == [*range(60 + len(kept), 100), *kept]


def test_the_recent_window_stays_active_whatever_its_topic(talked: Callable[..., Any]) -> None:
    """Also where the episode was built after it, and does not list it."""
    worker, session = talked(recent=8)
    episode = make_episode(session, everywhere(*range(60, 100)))
    assert episode.length == session.length
    recent = session.length - 8
    newest = [
        [[p for p in head if p >= recent] for head in layer] for layer in active(worker, session)
    ]
    switched(worker, session, episode)
    for layer, expected in zip(active(worker, session), newest, strict=True):
        for head, kept in zip(layer, expected, strict=True):
            assert kept, "the turn's last rows are its recent window"
            assert head == [*range(60 + len(kept), 100), *kept], "its lowest scores gave way"


def test_rows_of_a_repair_survive_a_switch(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, session = talked(budget=BUDGET + 8, repair_rows=8)
    promoted = list(worker.repair("s", text=words(5, seed=9)).report.promoted)
    assert len(promoted) == 8
    before = Selection.from_slot(worker.engine.cache, session.slot)
    switched(worker, session, make_episode(session, everywhere(*range(60, 60 + BUDGET))))
    after = Selection.from_slot(worker.engine.cache, session.slot)
    assert session.promoted_rows == 8
    for layer in range(2):
        for head in range(2):
            promoted = before.positions[layer][head][before.promoted[layer][head]].tolist()
            assert after.positions[layer][head][after.promoted[layer][head]].tolist() == promoted
            assert active(worker, session)[layer][head] == sorted(
                {*promoted, *range(60, 60 + BUDGET)}
            )


def test_a_failed_read_leaves_the_session_unchanged(
    talked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, session = talked()
    before = active(worker, session)
    worker.engine.store.truncate("s", 64)
    episode = make_episode(session, everywhere(100))
    with pytest.raises(Exception, match="cannot be read"):
        switched(worker, session, episode)
    assert active(worker, session) == before
    assert session.episode == NO_EPISODE


# In a turn


def test_a_turn_begins_with_its_episodes_rows(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, session = talked(method="epicache", budget=4 * BUDGET)
    episode = make_episode(session, everywhere(*range(40, 60)))
    done = worker.turn("s", words(4, seed=2), max_tokens=4, episode=episode)
    assert done.switched.episode == done.state.episode == "e"
    assert done.switched.rows_moved + done.switched.rows_kept == 80
    assert list(done.state.patched_prompt) == [5, 6, 7]
    assert "switch" in done.seconds
    assert all(
        set(range(40, 60)) <= set(head) for layer in active(worker, session) for head in layer
    )
    stays = worker.turn("s", words(4, seed=3), max_tokens=4)
    assert not stays.HasField("switched")
    assert stays.state.episode == "e"
    worker.check()


def test_a_turn_after_a_switch_attends_to_the_episodes_rows(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    """An episode of all rows is the full cache."""
    worker = make_worker("qwen3", block_tokens=256, recent=8)
    worker.open("full")
    worker.open("s", method="random", budget=300, layer_budgets="uniform")
    worker.open("small", method="random", budget=40, layer_budgets="uniform")
    for name in ("full", "s", "small"):
        worker.turn(name, words(80), generate=False)
    session = worker.engine.session("small")
    assert max(worker.memory("small").active_rows) <= 40
    state = worker.engine.snapshot(session)
    worker.open("small", method="random", budget=300, layer_budgets="uniform", state=state)
    everything = make_episode(session, everywhere(*range(session.length)))
    asked = words(8, seed=1)
    restored = worker.turn("small", asked, episode=everything)
    assert answer(restored) == answer(worker.turn("full", asked)) == answer(worker.turn("s", asked))


def test_a_bad_episode_refuses_the_turn_and_changes_nothing(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, session = talked()
    before = worker.engine.snapshot(session)
    with pytest.raises(BadEpisode):
        worker.turn("s", words(4), episode=make_episode(session, everywhere(1), length=10_000))
    assert worker.engine.snapshot(worker.engine.session("s")) == before
    worker.turn("s", words(4), max_tokens=2)


def test_a_session_opened_again_is_in_its_episode(
    talked: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker, session = talked(method="epicache")
    episode = make_episode(session, everywhere(*range(40, 60)))
    state = worker.turn("s", words(4, seed=2), max_tokens=4, episode=episode).state
    spec = {"method": "epicache", "budget": BUDGET, "layer_budgets": "uniform"}
    worker.open(**spec, state=state, epoch=2)
    again = worker.turn("s", words(4, seed=3), max_tokens=4, epoch=2, episode=episode)
    assert again.switched.rows_moved == 0
    assert list(again.state.patched_prompt) == [5, 6, 7]
