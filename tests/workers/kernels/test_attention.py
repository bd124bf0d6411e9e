"""Kernels of steps with retrieval, in Triton's interpreter, beside torch's and native code's draws and output.

With `TRITON_INTERPRET=0` on a GPU: codes of keys are there, and the rows in pinned memory of the host.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.key_codes import KeyCodes, SharedCodes, encode_keys
from tests.workers.made_up_step import LAYERS, Made, Shape, draws_differ, make, shapes
from tests.workers.parallel.stub_group import StubGroup
from workers.cache.transfers import Transfers
from workers.kernels.attention import KernelAttention
from workers.native.attention import NativeAttention
from workers.native.searched_rows import SearchedRows
from workers.retrieval.retriever import LAYER_STEP, Retriever
from workers.retrieval.sampling import ROTATIONS

DEVICE = torch.device("cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu")
# The interpreter takes a good part of a second for a step.
FEWER = settings(max_examples=settings().max_examples // 5)


@pytest.fixture
def kernels() -> KernelAttention:
    return KernelAttention(Transfers(DEVICE), ROTATIONS)


def run(made: Made, kernels: KernelAttention) -> tuple[Tensor, Tensor]:
    """Output of a step, and positions that it draws."""
    coded = [None if each is None else bring_codes(each) for each in made.searched]
    table = kernels.describe([None if each is None else each[0] for each in coded])
    queries, rows, mask = bring(made)
    assert kernels.takes(queries, rows, mask, table.layout)
    out, drawn = kernels.attend(
        *(queries, rows, mask, table),
        layer=made.shape.layer,
        rotation=LAYER_STEP * made.shape.layer,
        scale=made.shape.dim**-0.5,
    )
    drawn = drawn.cpu()
    assert torch.equal((drawn[:, :, 1:] >= 0).sum(2), drawn[:, :, 0])
    return out.cpu(), drawn[:, :, 1:]


def bring(made: Made) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """A step's queries, active rows and mask on the device; the rows as views of wider regions again."""
    keys, values, positions = (
        nn.functional.pad(each, (0, 0, 0, 3)).to(DEVICE)[:, :, : each.shape[2]]
        for each in (*made.rows[:2], made.rows[2][..., None])
    )
    mask = None if made.mask is None else made.mask.to(DEVICE)
    return made.queries.to(DEVICE), (keys, values, positions[..., 0]), mask


def bring_codes(searched: SearchedRows) -> tuple[SearchedRows, KeyCodes]:
    """Rows with codes on the device, and what has the memory of these."""
    layout, pages = searched.rows.layout, searched.rows.pages
    codes = KeyCodes(
        layout, SharedCodes(), lambda layout, page: encode_keys(layout, page).to(DEVICE)
    )
    codes.append([None] * len(pages), pages)
    return replace(searched, codes=codes.addresses), codes


def check(shape: Shape, kernels: KernelAttention, native: NativeAttention) -> None:
    """Compare draws and output with torch's in float32, and draws with those of native code."""
    made, reference = make(shape), make(shape, torch.float32)
    out, drawn = run(made, kernels)
    expected, theirs = reference.attend(None), made.draw(native)
    for index, retriever in enumerate(reference.retrievers):
        if retriever is None:
            assert bool((drawn[index] == -1).all())
        elif draws_differ(reference, index, drawn[index]):
            continue
        elif not draws_differ(reference, index, theirs[index]):
            assert torch.equal(drawn[index].sort().values, theirs[index].sort().values)
        # The interpreter cuts the output to bfloat16; a GPU rounds.
        relative = 1e-5 if shape.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(out[index].float(), expected[index], atol=1e-5, rtol=relative)


@FEWER
@given(shape=shapes(rows=400, sessions=3, heads=3))
def test_a_step_draws_the_rows_that_torch_and_native_code_do_and_says_the_same(
    shape: Shape, native: NativeAttention
) -> None:
    check(shape, KernelAttention(Transfers(DEVICE), ROTATIONS), native)


@pytest.mark.parametrize("group", [1, 7, 16])
def test_long_sessions_are_scored_in_parts_and_drawn_as_one(
    group: int, kernels: KernelAttention, native: NativeAttention
) -> None:
    shape = Shape([(3000, 64), None, (7, 64)], dim=64, group=group, shorter=True)
    check(shape, kernels, native)


def test_rows_of_the_same_priority_are_drawn_up_to_the_count(kernels: KernelAttention) -> None:
    """Keys that say nothing: all weights are equal, and so are ranks of positions that lie far apart."""
    made = make(Shape([(2000, 64)], active=4, sharpness=0.0))
    _, drawn = run(made, kernels)
    assert bool((drawn >= 0).all())
    assert all(len(set(head)) == 64 for head in drawn[0].tolist())
    assert not draws_differ(made, 0, drawn[0])


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_the_last_drawn_row_shares_what_is_left_where_it_would_be_certain(
    seed: int, kernels: KernelAttention, native: NativeAttention
) -> None:
    """Of these seeds' rows one that is drawn before it is not certain."""
    check(
        Shape([(60, 5)], heads=3, group=1, dim=8, active=3, sharpness=3.0, seed=seed),
        kernels,
        native,
    )


def test_rows_that_are_all_drawn_make_up_the_whole_cache(kernels: KernelAttention) -> None:
    made = make(Shape([(40, 64)], active=6))
    assert made.retrievers[0] is not None
    keys, values = made.retrievers[0].copy.rows.rows(made.shape.layer)
    some = torch.tensor([0, 3, 17, 18, 30, 39])
    rows = (keys[None][:, :, some], values[None][:, :, some], some.int().expand(1, 2, 6).clone())
    out, drawn = run(Made(made.shape, made.queries, rows, None, made.retrievers), kernels)
    whole = scaled_dot_product_attention(made.queries, keys[None], values[None])
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    rest = sorted(set(range(40)) - set(some.tolist()))
    assert drawn[0, :, :34].tolist() == [rest, rest]


def test_other_sessions_change_no_bit(kernels: KernelAttention) -> None:
    made = make(Shape([(900, 64), (5, 9), None, (300, 30)], dim=64))
    together, _ = run(made, kernels)
    for index, retriever in enumerate(made.retrievers):
        if retriever is not None:
            at = slice(index, index + 1)
            rows = (made.rows[0][at], made.rows[1][at], made.rows[2][at])
            alone, _ = run(Made(made.shape, made.queries[at], rows, None, [retriever]), kernels)
            assert torch.equal(alone, together[at])


def test_numbers_of_half_precision_are_read_as_they_are(kernels: KernelAttention) -> None:
    """Which native code does not have."""
    shape = Shape([(300, 20)], dtype=torch.float16)
    out, drawn = run(make(shape), kernels)
    reference = make(shape, torch.float32)
    assert not draws_differ(reference, 0, drawn[0])
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), reference.attend(None), atol=1e-3, rtol=2e-3)


def test_latents_are_keys_and_values_at_once(kernels: KernelAttention) -> None:
    made = make(Shape([(500, 20)], heads=1, group=4, dim=24))
    settings = Retrieval(index="exact")
    layout = PageLayout(LAYERS, 1, 24, torch.float32, "made up", latent=True)
    assert made.retrievers[0] is not None
    keys, _ = made.retrievers[0].copy.rows.rows(made.shape.layer)
    copy = build_copy(layout, settings, [(keys, keys)] * LAYERS)
    rows = (made.rows[0], made.rows[0], made.rows[2])
    latent = Made(made.shape, made.queries, rows, None, [Retriever(copy, settings, 20)])
    out, _ = run(latent, kernels)
    torch.testing.assert_close(out, latent.attend(None), atol=1e-5, rtol=1e-5)


def test_processes_that_divide_the_heads_draw_as_one(kernels: KernelAttention) -> None:
    made = make(Shape([(400, 20)], heads=4))
    made.rows[2][:, :, -1] = 405  # that of the query's own token is in every head
    out, drawn = run(made, kernels)
    [retriever] = made.retrievers
    assert retriever is not None
    keys, values = retriever.copy.rows.rows(made.shape.layer)
    for index in range(2):
        mine = slice(2 * index, 2 * index + 2)
        layout = replace(retriever.copy.layout, n_kv_heads=2)
        copy = build_copy(layout, Retrieval(index="exact"), [(keys[mine], values[mine])] * LAYERS)
        rows = (made.rows[0][:, mine], made.rows[1][:, mine], made.rows[2][:, mine])
        half = replace(made.shape, heads=2)
        part = Made(half, made.queries[:, mine], rows, None, [Retriever(copy, Retrieval(), 20)])
        group = StubGroup(index, 2)
        found, positions = run(part, KernelAttention(Transfers(DEVICE), ROTATIONS, group))
        assert torch.equal(found, out[:, mine])
        assert torch.equal(positions, drawn[:, mine])


@pytest.mark.parametrize(
    "change",
    [
        lambda made: replace(made, queries=made.queries.double()),
        lambda made: replace(made, queries=made.queries.mT.contiguous().mT),
        lambda made: replace(made, mask=torch.zeros(1, 1, made.shape.group, made.shape.active)),
    ],
)
def test_other_arguments_are_not_taken(change, kernels: KernelAttention) -> None:
    made = make(Shape([(70, 5)]))
    assert made.searched[0] is not None
    layout = made.searched[0].rows.layout
    assert kernels.takes(*bring(made), layout)
    assert not kernels.takes(*bring(change(made)), layout)
