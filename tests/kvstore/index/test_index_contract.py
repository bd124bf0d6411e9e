"""What every index over keys holds to, whatever it finds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.index.base import KeyIndex
from kvstore.index.dci.settings import PAPER, DciSettings
from kvstore.index.dci.tree import DciTree
from tests.kvstore.index.key_sets import KeySet

MakeIndex = Callable[[], KeyIndex]

HEADS, DIMENSIONS, ROWS = 2, 8, 1500
# An index joins with a line: its name, how it is made, and its least recall of the best 64 of 4,000 rows.
INDEXES: dict[str, tuple[MakeIndex, float]] = {
    "dci tree": (lambda: DciTree(DciSettings()), 0.95),
    "dci tree, all rows": (lambda: DciTree(DciSettings(scan=1.0)), 1.0),
    "dci tree, paper": (lambda: DciTree(replace(PAPER, scan_floor=2048)), 0.7),
    "dci tree, two levels": (
        lambda: DciTree(DciSettings(promotion=(1 / 16, 1 / 5))),
        0.95,
    ),
}
every_index = pytest.mark.parametrize("make", [make for make, _ in INDEXES.values()], ids=INDEXES)


def random_keys(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(HEADS, rows, DIMENSIONS, generator=torch.Generator().manual_seed(seed))


def found(index: KeyIndex, queries: Tensor) -> list[list[int]]:
    """Sorted positions per head, -1 left out; each is known and found once."""
    heads = []
    for head in index.candidates(queries).tolist():
        positions = sorted(position for position in head if position >= 0)
        assert len(set(positions)) == len(positions)
        assert all(position < index.rows for position in positions)
        heads.append(positions)
    return heads


@every_index
def test_an_empty_index_finds_nothing(make: MakeIndex) -> None:
    index = make()
    index.check()
    assert index.rows == 0
    index.extend(random_keys(0))
    assert found(index, random_keys(3, seed=1)) == [[], []]


@every_index
@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["extend", "truncate"]), st.integers(0, ROWS)), max_size=6
    ),
    rows=st.integers(0, ROWS),
    queries=st.integers(1, 4),
)
def test_what_is_found_depends_on_the_keys_alone(
    make: MakeIndex, steps: list[tuple[str, int]], rows: int, queries: int
) -> None:
    index = make()
    for number, (step, to) in enumerate(steps):
        # Rows that are forgotten had other keys than those which come in their place.
        if step == "truncate" or to < index.rows:
            index.truncate(to)
        else:
            index.extend(torch.cat([random_keys(ROWS)[:, : index.rows], others(number)], 1)[:, :to])
        index.check()
        found(index, random_keys(queries, seed=1))
    # What the last step left may have been made of other keys.
    index.truncate(0)
    for end in (rows // 3, rows // 2, rows):
        index.extend(random_keys(ROWS)[:, :end])
    index.check()
    fresh = make()
    fresh.extend(random_keys(ROWS)[:, :rows])
    asked = random_keys(queries, seed=1)
    assert index.rows == fresh.rows == rows
    assert found(index, asked) == found(fresh, asked)


def others(seed: int) -> Tensor:
    return random_keys(ROWS, seed=2 + seed)


@every_index
@settings(max_examples=25)
@given(first=st.integers(0, ROWS), kept=st.integers(0, ROWS), last=st.integers(0, ROWS))
def test_forgotten_rows_leave_no_trace(make: MakeIndex, first: int, kept: int, last: int) -> None:
    kept = min(kept, first)
    last = max(kept, last)
    common = random_keys(ROWS)[:, :kept]
    index = make()
    index.extend(torch.cat([common, others(0)], 1)[:, :first])
    index.truncate(kept)
    index.check()
    assert index.rows == kept
    found(index, random_keys(2, seed=1))
    keys = torch.cat([common, others(1)], 1)[:, :last]
    index.extend(keys)
    index.check()
    fresh = make()
    fresh.extend(keys)
    assert found(index, random_keys(2, seed=1)) == found(fresh, random_keys(2, seed=1))


@pytest.mark.parametrize("name", INDEXES)
def test_recall_on_real_keys(name: str, real_keys: KeySet) -> None:
    make, least = INDEXES[name]
    shares = []
    for keys, asked in zip(real_keys.keys, real_keys.queries, strict=True):
        index = make()
        index.extend(keys)
        for queries in asked:
            best = (queries @ keys.transpose(1, 2)).topk(64, dim=-1).indices
            for head, positions in enumerate(found(index, queries)):
                shares.append(torch.isin(best[head], torch.tensor(positions)).float().mean())
    assert torch.stack(shares).mean() >= least


@every_index
def test_an_index_is_small(make: MakeIndex, real_keys: KeySet) -> None:
    keys = real_keys.keys[0]
    for dtype in (torch.float32, torch.bfloat16):
        index = make()
        index.extend(keys[:, :3000].to(dtype))
        index.extend(keys.to(dtype))
        assert index.nbytes <= 0.1 * 2 * keys.to(dtype).nbytes


@every_index
def test_keys_of_fewer_rows_are_refused(make: MakeIndex) -> None:
    index = make()
    index.extend(random_keys(600))
    with pytest.raises(RowRangeError, match="599 rows"):
        index.extend(random_keys(599))
    with pytest.raises(RowRangeError, match="1 heads"):
        index.extend(random_keys(700)[:1])


def test_scanning_every_row_is_brute_force() -> None:
    index = DciTree(replace(DciSettings(), scan=1.0))
    index.extend(random_keys(ROWS))
    assert found(index, random_keys(2, seed=1)) == [list(range(ROWS))] * HEADS
