"""Selection of rows by score and by protection, and of tokens by a repair."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.cache.active_cache import EMPTY
from workers.primitives.selection import (
    bursts,
    mask_to_indices,
    newest_first,
    position_mask,
    protected,
    top_over_heads,
    top_per_head,
    whole_chunks,
)

SCORES = st.integers(-4, 4).map(float)
"""Few different values: ties everywhere."""


def _positions(heads: list[list[int]]) -> torch.Tensor:
    width = max(map(len, heads))
    return torch.tensor(
        [row + [EMPTY] * (width - len(row)) for row in heads], dtype=torch.int32
    ).view(len(heads), width)


@given(
    st.lists(st.lists(SCORES, max_size=12), min_size=1, max_size=3),
    st.integers(0, 14),
)
def test_each_head_keeps_its_best_rows_in_order(scores: list[list[float]], rows: int) -> None:
    positions = _positions(
        [[3 * i + head for i in range(len(row))] for head, row in enumerate(scores)]
    )
    width = positions.shape[1]
    padded = torch.tensor([row + [9.0] * (width - len(row)) for row in scores]).view(
        len(scores), width
    )
    indices = top_per_head(padded, positions, rows)
    assert indices.shape == (len(scores), min(rows, width))
    for row, kept in zip(scores, indices.tolist(), strict=True):
        best = sorted(range(len(row)), key=lambda index: (-row[index], index))[:rows]
        assert kept == sorted(best) + [-1] * (min(rows, width) - len(best))


def test_an_infinite_score_is_kept_before_all_others() -> None:
    scores = torch.tensor([[5.0, 1.0, torch.inf, 4.0]])
    positions = torch.arange(4, dtype=torch.int32)[None]
    assert top_per_head(scores, positions, 2).tolist() == [[0, 2]]


HEADS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), SCORES, st.booleans()), max_size=14),
    min_size=1,
    max_size=3,
)
"""Per head, for each row: distance to the previous row, score, and protection."""


def _drawn(heads: list[list[tuple[int, float, bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, infinite for protected rows, and positions; absent rows have scores not to count."""
    positions = _positions([list(accumulate(gap for gap, _, _ in head)) for head in heads])
    width = positions.shape[1]
    scores = [
        [torch.inf if safe else score for _, score, safe in head] + [9.0] * (width - len(head))
        for head in heads
    ]
    return torch.tensor(scores).view(len(heads), width), positions


def _kept(indices: torch.Tensor) -> list[list[int]]:
    """Indices per head, after a check of their form: ascending, -1 at the end."""
    found = [[index for index in head if index >= 0] for head in indices.tolist()]
    width = max(map(len, found))
    assert indices.tolist() == [head + [-1] * (width - len(head)) for head in found]
    assert all(head == sorted(set(head)) for head in found)
    return found


@given(HEADS, st.integers(0, 16), st.integers(0, 8))
def test_a_layers_rows_go_to_the_best_of_all_heads_above_a_floor(
    heads: list[list[tuple[int, float, bool]]], rows: int, floor: int
) -> None:
    scores, positions = _drawn(heads)
    found = _kept(top_over_heads(scores, positions, rows, floor))
    ranked = []
    for head, drawn in enumerate(heads):
        best = sorted(range(len(drawn)), key=lambda index: (-float(scores[head, index]), index))
        for rank, index in enumerate(best):
            tier = 2 if drawn[index][2] else int(rank < floor)
            ranked.append((-tier, -float(scores[head, index]), head, index))
    best_of_all = sorted(ranked)[: rows * len(heads)]
    assert found == [
        sorted(index for *_, of, index in best_of_all if of == head) for head in range(len(heads))
    ]


@given(HEADS, st.integers(0, 16), st.integers(1, 6))
def test_chunks_are_kept_whole_best_first(
    heads: list[list[tuple[int, float, bool]]], rows: int, chunk: int
) -> None:
    scores, positions = _drawn(heads)
    of_chunk = torch.tensor([3.0, -2, 1, 1, 0, 4, 1, -1, 2, 3] * 6)
    scores = torch.where(
        scores.isposinf(), scores, of_chunk[(positions // chunk).clamp(max=59).long()]
    )
    for head, (drawn, found) in enumerate(
        zip(heads, _kept(whole_chunks(scores, positions, rows, chunk)), strict=True)
    ):
        safe = [index for index, row in enumerate(drawn) if row[2]]
        members: dict[int, list[int]] = {}
        for index in set(range(len(drawn))) - set(safe):
            members.setdefault(int(positions[head, index]) // chunk, []).append(index)
        expected = safe[:rows]
        left = rows - len(safe)
        for number in sorted(members, key=lambda number: (-float(of_chunk[number]), number)):
            if len(members[number]) > left:
                expected += sorted(members[number])[: max(0, left)] if rows < chunk else []
                break
            expected += members[number]
            left -= len(members[number])
        assert found == sorted(expected)


@given(HEADS, st.integers(0, 16), st.integers(0, 16))
def test_the_newest_rows_come_before_all_but_protected_ones(
    heads: list[list[tuple[int, float, bool]]], newest: int, rows: int
) -> None:
    scores, positions = _drawn(heads)
    found = _kept(_trimmed(top_per_head(newest_first(scores, positions, newest), positions, rows)))
    for drawn, kept in zip(heads, found, strict=True):
        count = len(drawn)
        tiers = [
            2 if safe else int(index >= count - newest) for index, (_, _, safe) in enumerate(drawn)
        ]
        values = [
            index if tier == 1 else score
            for index, ((_, score, _), tier) in enumerate(zip(drawn, tiers, strict=True))
        ]
        best = sorted(range(count), key=lambda i: (-tiers[i], -values[i] if tiers[i] < 2 else 0, i))
        assert kept == sorted(best[:rows])


def _trimmed(indices: torch.Tensor) -> torch.Tensor:
    return indices[:, : int((indices >= 0).sum(1).max())]


def test_no_head_is_left_out_of_a_tie() -> None:
    positions = torch.arange(4, dtype=torch.int32).repeat(2, 1)
    assert top_over_heads(torch.zeros(2, 4), positions, 2).tolist() == [[0, 1, 2, 3], [-1] * 4], (
        "the lower head first"
    )
    assert top_over_heads(torch.zeros(2, 4), positions, 2, floor=1).tolist() == [
        [0, 1, 2],
        [0, -1, -1],
    ]


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.integers(0, 8),
    st.integers(0, 12),
    st.integers(0, 60),
    st.integers(0, 30),
)
def test_protected_rows_are_sinks_recent_rows_and_the_turns_share(
    held: set[int], sinks: int, recent: int, turn_start: int, turn_rows: int
) -> None:
    positions = torch.tensor([sorted(held)], dtype=torch.int32)
    flags = protected(
        positions, sinks=sinks, recent=recent, turn_start=turn_start, turn_rows=turn_rows, end=61
    )
    newest_of_turn = {p for p in range(turn_start, 61) if p >= 61 - turn_rows}
    expected = [p < sinks or p >= 61 - recent or p in newest_of_turn for p in sorted(held)]
    assert flags[0].tolist() == expected


def reference_bursts(
    scores: list[float],
    candidates: list[bool],
    tie: list[float],
    count: int,
    before: int,
    after: int,
) -> list[int]:
    """RepairKV Algorithm 1 with section 3.3's SELECT, step by step.

    Rank the evicted rows; take each as an anchor in turn, and with it the burst of evicted rows
    around it that are not chosen yet, while the restore budget lasts.
    """
    evicted = {i for i, candidate in enumerate(candidates) if candidate}
    ranked = sorted(evicted, key=lambda i: (-scores[i], -tie[i], i))
    chosen: set[int] = set()
    for anchor in ranked:
        if anchor in chosen:
            continue
        window = [i for i in range(anchor - before, anchor + after + 1) if i in evicted - chosen]
        room = count - len(chosen)
        if len(window) > room:
            following = [i for i in window if i > anchor]
            preceding = [i for i in window if i < anchor]
            window = [anchor, *following, *reversed(preceding)][:room]
        chosen |= set(window)
    return sorted(chosen)


ROWS = st.lists(st.tuples(SCORES, st.booleans(), SCORES), max_size=60)


@given(ROWS, st.integers(0, 70), st.integers(0, 4), st.integers(0, 8))
def test_bursts_are_those_of_the_paper(
    rows: list[tuple[float, bool, float]], count: int, before: int, after: int
) -> None:
    scores = [row[0] for row in rows]
    candidates = [row[1] for row in rows]
    tie = [row[2] for row in rows]
    chosen = bursts(
        torch.tensor(scores),
        torch.tensor(candidates, dtype=torch.bool),
        torch.tensor(tie),
        count,
        before=before,
        after=after,
    )
    assert chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == len(chosen) == min(count, sum(candidates))
    assert all(candidates[position] for position in chosen.tolist())
    assert chosen.tolist() == reference_bursts(scores, candidates, tie, count, before, after)


def test_anchors_come_by_score_then_by_eviction_score_then_by_position() -> None:
    all_tokens = torch.ones(6, dtype=torch.bool)
    scores = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    tie = torch.tensor([0.1, 0.3, 0.0, 0.3, 0.2, 9.0])
    chosen = [
        bursts(scores, all_tokens, tie, count, before=0, after=0).tolist()
        for count in (1, 2, 3, 4, 5)
    ]
    assert chosen == [[2], [1, 2], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_the_last_burst_is_truncated_to_the_anchor_and_tokens_behind_it() -> None:
    all_tokens = torch.ones(40, dtype=torch.bool)
    scores = torch.zeros(40)
    scores[20] = 1
    assert bursts(scores, all_tokens, scores, 3, before=2, after=20).tolist() == [20, 21, 22]
    assert bursts(scores, all_tokens, scores, 21, before=2, after=20).tolist() == [
        19,
        *range(20, 40),
    ]
    assert bursts(scores, all_tokens, scores, 22, before=2, after=20).tolist() == list(
        range(18, 40)
    )


@pytest.mark.parametrize("none", [-1, EMPTY])
def test_masks_and_indices_are_each_others_inverse(none: int) -> None:
    positions = torch.tensor([[0, 3, none], [1, 2, 4], [none, none, none]])
    assert [
        [p for p in head if p >= 0]
        for head in mask_to_indices(position_mask(positions, 5)).tolist()
    ] == [
        [0, 3],
        [1, 2, 4],
        [],
    ]


def test_an_empty_mask_gives_no_indices() -> None:
    assert mask_to_indices(torch.zeros(2, 5, dtype=torch.bool)).shape == (2, 0)
    assert mask_to_indices(torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)
