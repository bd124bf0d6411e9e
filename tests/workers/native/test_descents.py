"""Native descents through summaries of keys, beside torch's: the same draws, and the same output."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.made_up_copy import add_rows, build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.summaries import KeySummaries
from tests.workers.made_up_step import Made, Shape, make
from tests.workers.native.test_attention import CAPABILITIES, supported
from workers.native.attention import NativeAttention
from workers.native.library import open_library
from workers.positions.chunks import Chunks
from workers.retrieval.sampling import ROTATIONS

# As many nodes of a level as make a descent of three levels of a few thousand rows.
SEARCH = Retrieval(index="summaries", nodes=24)
LENGTHS = (5, 8, 23, 1000, 4099, 9001)
BEHIND = Chunks(1200, 400)


def draw_by_torch(made: Made, index: int) -> Tensor:
    """Positions that torch draws for a session, -1 for none."""
    retriever = made.retrievers[index]
    assert retriever is not None
    shape, seen = made.shape, made.seen[index]
    rows = made.rows[2][index]
    return retriever.search(shape.layer, made.queries[index], rows, shape.dim**-0.5, seen)[0]


def count_other_draws(shape: Shape, native: NativeAttention) -> int:
    """Count heads whose draw is not torch's, and compare the output of sessions that have none."""
    made, reference = make(shape), make(shape, torch.float32)
    drawn, found, expected = made.draw(native), made.attend(native), reference.attend(None)
    others = 0
    for index, retriever in enumerate(reference.retrievers):
        if retriever is None:
            continue
        theirs = draw_by_torch(reference, index)
        mine = drawn[index]
        pairs = zip(mine.tolist(), theirs.tolist(), strict=True)
        differ = sum({p for p in a if p >= 0} != {p for p in b if p >= 0} for a, b in pairs)
        others += differ
        if not differ:
            relative = 1e-4 if shape.dtype == torch.float32 else 2**-8
            torch.testing.assert_close(
                found[index].float(), expected[index], atol=1e-5, rtol=relative
            )
    return others


@pytest.mark.parametrize("chunks", [None, BEHIND])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_descent_draws_the_rows_that_torch_does_and_says_the_same(
    dtype: torch.dtype, chunks: Chunks | None, native: NativeAttention
) -> None:
    others = heads = 0
    for seed, (length, dim) in enumerate(product(LENGTHS, (20, 64))):
        sessions = [(length, 40), None, (length // 2 + 1, 7)]
        shape = Shape(sessions, heads=3, dim=dim, sharpness=1 + seed % 3, dtype=dtype, seed=seed)
        shape = replace(shape, shorter=seed % 2 == 1, chunks=chunks, search=SEARCH)
        others += count_other_draws(shape, native)
        heads += 2 * shape.heads
    # Sums of another order decide between priorities that are as good as equal, and all below follows.
    assert others <= heads // 30


@pytest.mark.parametrize("level", supported())
def test_every_level_of_instructions_descends_alike(level: str, native_folder: Path) -> None:
    opened, library = open_library(CAPABILITIES[level], native_folder)
    assert opened == level
    assert library is not None
    native = NativeAttention(level, library, ROTATIONS)
    others = sum(
        count_other_draws(Shape([(9000, 64), None], dim=64, seed=seed, search=SEARCH), native)
        for seed in range(10)
    )
    assert others <= 1


def test_neither_threads_nor_other_sessions_change_a_bit_of_a_descent(
    native: NativeAttention,
) -> None:
    shape = Shape([(50_000, 64), (5, 9), None, (20_000, 30)], heads=3, search=SEARCH)
    made = make(shape)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            outs.append(made.attend(native))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)
    for index, retriever in enumerate(made.retrievers):
        at = slice(index, index + 1)
        rows = (made.rows[0][at], made.rows[1][at], made.rows[2][at])
        if retriever is not None:
            alone = Made(shape, made.queries[at], rows, None, [retriever])
            assert torch.equal(alone.attend(native), outs[0][at])


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [20, 64])
def test_native_summaries_are_those_of_torch_in_whatever_pieces_rows_come(
    dim: int, dtype: torch.dtype, latent: bool, native: NativeAttention
) -> None:
    layout = PageLayout(2, 3, dim, dtype, "made up", latent=latent)
    length, first = 5003, 20 * layout.page_tokens
    random = torch.Generator().manual_seed(dim)
    keys = torch.randn(layout.n_layers, 3, length, dim, generator=random).to(dtype)
    copy = build_copy(layout, SEARCH, [(each[:, :first],) * 2 for each in keys], native)
    add_rows(copy, [(each[:, first:],) * 2 for each in keys])
    copy.rows.length = length  # `add_rows` counts those that it adds
    for _ in copy.index_rows():
        pass
    for layer in range(layout.n_layers):
        expected, made = KeySummaries(), copy.summaries(layer)
        expected.extend(keys[layer])
        assert made is not None
        for level in (1, 2, 3, 4):
            torch.testing.assert_close(made.nodes(level), expected.nodes(level))


def test_rows_that_came_after_the_last_index_are_left_to_torch() -> None:
    made = make(Shape([(1024, 40)], search=SEARCH))
    retriever = made.retrievers[0]
    assert retriever is not None
    copy = retriever.copy
    assert retriever.searched_rows(0) is not None
    copy.append([None], [copy.rows.pages[0]], 1030)
    assert retriever.searched_rows(0) is None
    for _ in copy.index_rows():
        pass
    assert retriever.searched_rows(0) is not None
