"""Queries of a turn that eviction methods observe."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.episodes import ActiveEpisode
from workers.engine.selection import Selection
from workers.methods.base import LayerRows
from workers.methods.streaming_llm import StreamingLLM
from workers.primitives.observation import Observation, RecentQueries

LAYERS = 2
HEADS = 3
HEAD_DIM = 4


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), max_size=6))
def test_the_last_tokens_are_kept_with_their_positions(
    width: int, pushes: list[tuple[int, int]]
) -> None:
    """A step observes the widest window of its batch, which may be more than this width."""
    recent = RecentQueries(width)
    everything = (
        torch.arange(LAYERS * HEADS * 80 * HEAD_DIM).float().view(LAYERS, HEADS, 80, HEAD_DIM)
    )
    appended = 0
    for tokens, more in pushes:
        observed = min(width + more, tokens)
        queries = everything[:, :, appended + tokens - observed : appended + tokens]
        recent.push(queries, torch.arange(appended, appended + tokens, dtype=torch.int32))
        appended += tokens
    window = recent.observed()
    assert window.positions.tolist() == list(range(max(0, appended - width), appended))
    assert window.tokens == min(width, appended)
    for layer, observed_queries in enumerate(window.queries):
        assert torch.equal(
            observed_queries, everything[layer, :, max(0, appended - width) : appended]
        )


def test_a_method_that_observes_nothing_holds_nothing() -> None:
    recent = RecentQueries(0)
    recent.push(torch.ones(LAYERS, HEADS, 1, HEAD_DIM), torch.tensor([0]))
    assert recent.observed().queries == ()
    assert recent.observed().tokens == 0


def test_a_new_turn_starts_with_nothing_observed() -> None:
    recent = RecentQueries(4)
    recent.push(torch.ones(LAYERS, HEADS, 2, HEAD_DIM), torch.tensor([0, 1]))
    recent.clear()
    assert recent.observed().queries == ()
    recent.push(torch.zeros(LAYERS, HEADS, 1, HEAD_DIM), torch.tensor([2]))
    assert recent.observed().positions.tolist() == [2]
    assert recent.observed().queries[0].shape == (HEADS, 1, HEAD_DIM)


# Patched prompts

ASKED = [1, 2]
BLOCK = [3, 4, 5, 6, 7]
EPISODE = [8, 9, 10]


def test_a_window_needs_no_prompt() -> None:
    assert not Observation(window=4).uses_patched_prompt
    assert Observation(window=4).patched_prompts([], BLOCK, EPISODE, 20) == []


def test_a_prompt_is_run_as_it_is() -> None:
    assert Observation(prompt="?").patched_prompts(ASKED, BLOCK, EPISODE, 20) == [ASKED]
    assert Observation(prompt="?").patched_prompts(ASKED, BLOCK, EPISODE, 1) == [[1]]
    assert Observation(prompt="?").patched_prompts(ASKED, BLOCK, EPISODE, 0) == []


def test_a_block_is_repeated_in_pieces_that_fit() -> None:
    repeat = Observation(prompt="?", repeats_block=True)
    assert repeat.patched_prompts(ASKED, BLOCK, EPISODE, 7) == [[*ASKED, *BLOCK]]
    assert repeat.patched_prompts(ASKED, BLOCK, EPISODE, 4) == [
        [1, 2, 3, 4],
        [1, 2, 5, 6],
        [1, 2, 7],
    ]
    assert repeat.patched_prompts(ASKED, [], EPISODE, 7) == [ASKED]
    assert Observation(repeats_block=True).patched_prompts([], BLOCK, EPISODE, 20) == [BLOCK]


def test_an_episodes_tokens_follow_the_instruction_in_pieces_that_fit() -> None:
    episode = Observation(prompt="?", episode=True, window=3)
    assert episode.patched_prompts(ASKED, BLOCK, EPISODE, 20) == [[*ASKED, *EPISODE]]
    pieces = episode.patched_prompts(ASKED, BLOCK, EPISODE, 4)
    assert [token for piece in pieces for token in piece[2:]] == EPISODE, "all of it"
    assert all(piece[:2] == ASKED and len(piece) <= 4 for piece in pieces)
    assert episode.patched_prompts([1, 2, 3, 4], BLOCK, EPISODE[:2], 4) == [[1, 2, *EPISODE[:2]]]
    assert episode.patched_prompts(ASKED, BLOCK, [], 20) == [], (
        "without an episode the window is observed"
    )


@dataclass(frozen=True)
class Indifferent(StreamingLLM):
    """Records the number of observed tokens, and ranks by position alone."""

    observes: Observation = field(default_factory=Observation)
    seen: list[int] = field(default_factory=list)

    @property
    def observation(self) -> Observation:
        return self.observes

    def scores(self, rows: LayerRows) -> torch.Tensor:
        self.seen.append(rows.queries.shape[1])
        assert rows.query_positions.shape == (rows.queries.shape[1],)
        return super().scores(rows)


@pytest.mark.parametrize(
    "observes",
    [
        Observation(prompt="Summarise the above."),
        Observation(prompt="Repeat:", repeats_block=True),
        Observation(prompt="Extract:", episode=True, window=8),
        Observation(accumulate="attention"),
        Observation(accumulate="hits"),
    ],
    ids=["prompt", "repeats_block", "episode", "attention", "hits"],
)
def test_observing_leaves_no_trace(
    observes: Observation, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """An observed session generates the same tokens and keeps the same rows as another."""
    states = []
    appended = []
    plain = Indifferent(observes=Observation(window=observes.window))
    observing = Indifferent(observes=observes)
    for method in (plain, observing):
        worker = make_worker(block_tokens=24, recent=8, prompt_tokens=20)
        worker.open(method="streaming_llm", budget=40)
        session = worker.engine.session("s")
        session.config = replace(session.config, method=method)
        session.queries = RecentQueries(method.observation.window)
        session.episode = ActiveEpisode(patched_prompt=tuple(range(100, 130)))
        turns = [worker.turn("s", words(60, seed=turn), max_tokens=70) for turn in range(2)]
        assert worker.memory().length == worker.engine.store.length("s")
        worker.check()
        appended.append([list(turn.token_ids) for turn in turns])
        rows = [worker.engine.cache.get_rows(session.slot, layer) for layer in range(2)]
        states.append(
            (
                turns[-1].memory.length,
                Selection.from_slot(worker.engine.cache, session.slot).to_bytes(),
                torch.cat([tensor.flatten().double() for layer in rows for tensor in layer]),
            )
        )
    assert appended[0] == appended[1]
    assert states[0][:2] == states[1][:2]
    assert torch.equal(states[0][2], states[1][2])
    assert max(plain.seen) <= observes.window
    assert min(observing.seen) > observes.window or observes.accumulate, "before every eviction"


def test_the_window_is_unchanged_by_an_eviction_during_decoding(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """An eviction with a patched prompt, between two tokens."""
    worker = make_worker(block_tokens=24, recent=8)
    worker.open(method="snapkv", budget=40)
    engine = worker.engine
    session = worker.engine.session("s")
    method = Indifferent(
        observes=Observation(window=6, prompt="Summarise the above.", repeats_block=True)
    )
    session.config = replace(session.config, method=method)
    session.queries = RecentQueries(6)
    resident = engine.swap_in(session)
    for block in torch.randint(2, 1270, (60,), generator=torch.Generator().manual_seed(3)).split(
        20
    ):
        engine.forward([resident], block[None])
    before = session.queries.observed()
    assert engine.cache.rows_per_head(session.slot)[0] > 40
    engine.evict(resident)
    after = session.queries.observed()
    assert session.length == 60
    assert engine.cache.rows_per_head(session.slot) == [40, 40]
    assert torch.equal(before.positions, after.positions)
    assert all(torch.equal(a, b) for a, b in zip(before.queries, after.queries, strict=True))
    worker.check()
