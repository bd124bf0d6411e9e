"""Native attention of steps with retrieval, beside torch's: the same draws, and the same output."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.key_codes import encode_keys
from tests.workers.made_up_step import CPU, LAYERS, Made, Shape, draws_differ, make, shapes
from workers.cache.logits import Logits
from workers.native.attention import NativeAttention
from workers.native.library import LEVELS, open_library
from workers.retrieval.retriever import LAYER_STEP, Retriever
from workers.retrieval.sampling import ROTATIONS
from workers.retrieval.step import RetrievalStep


def check(shape: Shape, native: NativeAttention) -> None:
    """Compare draws and output with torch's, which computes the same numbers in float32."""
    made, reference = make(shape), make(shape, torch.float32)
    drawn, found, expected = made.draw(native), made.attend(native), reference.attend(None)
    assert found.dtype == shape.dtype
    for index, retriever in enumerate(reference.retrievers):
        if retriever is None:
            assert bool((drawn[index] == -1).all())
        elif draws_differ(reference, index, drawn[index]):
            continue
        # Of bfloat16 the output alone is rounded.
        relative = 1e-5 if shape.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found[index].float(), expected[index], atol=1e-5, rtol=relative)
    counted = sum(each.counts.rows for each in made.retrievers if each is not None)
    assert counted == int((drawn >= 0).sum())


@given(shape=shapes())
def test_a_step_draws_the_rows_that_torch_does_and_says_the_same(
    shape: Shape, native: NativeAttention
) -> None:
    check(shape, native)


@given(shape=shapes(behind=True))
def test_a_step_behind_the_window_draws_the_rows_that_torch_does_and_says_the_same(
    shape: Shape, native: NativeAttention
) -> None:
    check(shape, native)


CAPABILITIES = {"baseline": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}


def supported() -> list[str]:
    """Levels of instructions that this CPU has."""
    here = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": ["baseline", "avx2"], "AVX512": list(LEVELS)}.get(here, ["baseline"])


@pytest.mark.parametrize("level", supported())
def test_every_level_of_instructions_that_the_cpu_has_computes_the_same(
    level: str, native_folder: Path
) -> None:
    opened, library = open_library(CAPABILITIES[level], native_folder)
    assert opened == level
    assert library is not None
    for seed, dtype in enumerate([torch.float32, torch.bfloat16]):
        shape = Shape([(3000, 64), None, (7, 64)], dim=64, shorter=True, dtype=dtype, seed=seed)
        check(shape, NativeAttention(level, library, ROTATIONS))


def test_neither_threads_nor_other_sessions_change_a_bit(native: NativeAttention) -> None:
    made = make(Shape([(20_000, 64), (5, 9), None, (9000, 30)], dim=64, heads=3))
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            outs.append((made.attend(native), made.draw(native)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))
    for index, retriever in enumerate(made.retrievers):
        if retriever is not None:
            at = slice(index, index + 1)
            rows = (made.rows[0][at], made.rows[1][at], made.rows[2][at])
            alone = Made(made.shape, made.queries[at], rows, None, [retriever])
            assert torch.equal(alone.attend(native), outs[0][0][at])


def test_rows_that_are_all_drawn_make_up_the_whole_cache(native: NativeAttention) -> None:
    made = make(Shape([(40, 64)], active=6))
    assert made.retrievers[0] is not None
    keys, values = made.retrievers[0].copy.rows.rows(made.shape.layer)
    some = torch.tensor([0, 3, 17, 18, 30, 39])
    rows = (keys[None][:, :, some], values[None][:, :, some], some.int().expand(1, 2, 6).clone())
    found = Made(made.shape, made.queries, rows, None, made.retrievers).attend(native)
    whole = torch.nn.functional.scaled_dot_product_attention(made.queries, keys[None], values[None])
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


class Refusal(Exception):
    """Native code was called for what it does not compute."""


@pytest.fixture
def refusing(native: NativeAttention, monkeypatch: pytest.MonkeyPatch) -> NativeAttention:
    """Native code that fails where it is called."""

    def refuse(*_: object, **__: object) -> None:
        raise Refusal

    monkeypatch.setattr(native, "attend", refuse)
    return native


def test_the_native_code_is_called_for_what_it_computes(refusing: NativeAttention) -> None:
    """So the tests below can fail."""
    with pytest.raises(Refusal):
        make(Shape([(70, 5), None])).attend(refusing)


def test_queries_of_single_heads_are_computed_however_they_lie(refusing: NativeAttention) -> None:
    """A model without groups: each query head has a KV head of its own."""
    made = make(Shape([(70, 5), None], group=1))
    shape, dim = made.queries.shape, made.shape.dim
    queries = made.queries.as_strided(shape, (2 * dim, dim, 7 * dim, 1))
    with pytest.raises(Refusal):
        Made(made.shape, queries, made.rows, None, made.retrievers).attend(refusing)


@pytest.mark.parametrize(
    "settings",
    [
        Retrieval(index="exact", choice="best"),
        Retrieval(index="summaries", choice="best"),
        Retrieval(index="tree"),
    ],
)
def test_torch_computes_a_batch_with_a_session_that_searches_in_another_way(
    settings: Retrieval, refusing: NativeAttention
) -> None:
    made = make(Shape([(70, 5), None]))
    assert made.retrievers[0] is not None
    rows = made.retrievers[0].copy.rows
    copy = build_copy(rows.layout, settings, [rows.rows(layer) for layer in range(LAYERS)])
    together = Made(made.shape, made.queries, made.rows, None, [Retriever(copy, settings, 5), None])
    assert together.attend(refusing).isfinite().all()


def test_torch_computes_numbers_that_the_native_code_does_not_have(
    refusing: NativeAttention,
) -> None:
    assert make(Shape([(70, 5)]), torch.float16).attend(refusing).dtype == torch.float16


def test_torch_computes_rows_that_are_stored_in_other_numbers(refusing: NativeAttention) -> None:
    made, stored = make(Shape([(70, 5)])), make(Shape([(70, 5)]), torch.bfloat16)
    mixed = Made(made.shape, made.queries, made.rows, None, stored.retrievers)
    assert mixed.attend(refusing).dtype == torch.float32


def test_torch_computes_a_mask_that_differs_between_queries(refusing: NativeAttention) -> None:
    made = make(Shape([(70, 5)], shorter=True))
    assert made.mask is not None
    mask = made.mask.expand(-1, -1, made.shape.group, -1)
    some = Made(made.shape, made.queries, made.rows, mask, made.retrievers)
    torch.testing.assert_close(some.attend(refusing), made.attend(None))


@pytest.mark.parametrize("logits", [Logits(0.25, softcap=20.0), Logits(0.25, sinks=torch.ones(6))])
def test_torch_computes_logits_that_are_more_than_products(
    logits: Logits, refusing: NativeAttention
) -> None:
    made = make(Shape([(70, 5)]))
    outs = [
        RetrievalStep(made.retrievers, CPU, native).attend(0, made.queries, made.rows, None, logits)
        for native in (refusing, None)
    ]
    assert torch.equal(*outs)


def test_latents_are_keys_and_values_at_once(native: NativeAttention) -> None:
    """Their copy in host memory has one part."""
    made = make(Shape([(500, 20)], heads=1, group=4, dim=24))
    settings = Retrieval(index="exact")
    layout = PageLayout(LAYERS, 1, 24, torch.float32, "made up", latent=True)
    assert made.retrievers[0] is not None
    keys, _ = made.retrievers[0].copy.rows.rows(made.shape.layer)
    copy = build_copy(layout, settings, [(keys, keys)] * LAYERS)
    rows = (made.rows[0], made.rows[0], made.rows[2])
    outs = [
        Made(made.shape, made.queries, rows, None, [Retriever(copy, settings, 20)]).attend(by)
        for by in (native, None)
    ]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@given(shape=shapes() | shapes(behind=True))
def test_a_draw_without_attention_is_the_same_one(shape: Shape, native: NativeAttention) -> None:
    """For queries of a GPU, and for logits that are more than products."""
    made, reference = make(shape), make(shape, torch.float32)
    together = made.draw(native)
    for index, (retriever, beside) in enumerate(
        zip(made.retrievers, reference.retrievers, strict=True)
    ):
        if retriever is None or beside is None:
            continue
        searched, seen = made.searched[index], made.seen[index]
        assert searched is not None
        positions, bias = native.draw(
            made.queries[index],
            made.rows[2][index],
            searched,
            rotation=LAYER_STEP * shape.layer,
            scale=shape.dim**-0.5,
        )
        assert torch.equal(positions, together[index, :, : retriever.count].long())
        assert torch.equal(positions < 0, bias.isneginf())
        if draws_differ(reference, index, positions):
            continue
        found, expected = beside.search(
            shape.layer, reference.queries[index], made.rows[2][index], shape.dim**-0.5, seen
        )
        for head in range(shape.heads):
            mine, theirs = (
                {p: float(b) for p, b in zip(at[head].tolist(), of[head], strict=True) if p >= 0}
                for at, of in ((positions, bias), (found, expected))
            )
            common = sorted(mine.keys() & theirs.keys())
            assert [mine[p] for p in common] == pytest.approx(
                [theirs[p] for p in common], rel=1e-3, abs=1e-3
            )


def test_a_step_that_torch_attends_draws_natively(
    native: NativeAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(Shape([(700, 20)]))
    [retriever] = made.retrievers
    assert retriever is not None
    expected = RetrievalStep([retriever], CPU, None)
    logits = Logits(0.25, softcap=20.0)
    torched = expected.attend(1, made.queries, made.rows, None, logits)
    retriever.copy.native = native
    monkeypatch.setattr(Retriever, "search", None)
    found = RetrievalStep([retriever], CPU, native)
    drawn = found.attend(1, made.queries, made.rows, None, logits)
    torch.testing.assert_close(drawn, torched, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_gathered_from_pages(native: NativeAttention, dtype: torch.dtype) -> None:
    layout = PageLayout(LAYERS, 2, 24, dtype, "made up", page_tokens=16)
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(LAYERS, 2, 2, 100, 24, generator=random).to(dtype)
    copy = build_copy(layout, None, [(keys, values) for keys, values in rows], native)
    positions = torch.randint(-5, 110, (2, 40), generator=random)
    found = copy.gather_keys(1, positions)
    places = positions.clamp(0, 99)[..., None].expand(-1, -1, 24)
    assert torch.equal(found, rows[1, 0].gather(1, places))
    copy.native = None
    assert torch.equal(found, copy.gather_keys(1, positions))


@given(
    heads=st.integers(1, 3),
    dim=st.integers(1, 40),
    tokens=st.integers(1, 20),
    latent=st.booleans(),
    side=st.integers(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    odd=st.sampled_from([None, 0.0, torch.nan, torch.inf, 1e-42]),
    seed=st.integers(0, 1000),
)
def test_keys_are_encoded_to_the_bits_of_torch(
    heads: int,
    dim: int,
    tokens: int,
    latent: bool,
    side: int,
    dtype: torch.dtype,
    odd: float | None,
    seed: int,
    native: NativeAttention,
) -> None:
    layout = PageLayout(2, heads, dim, dtype, "m", tokens, side, latent)
    rows = torch.randn(layout.rows_shape(tokens), generator=torch.Generator().manual_seed(seed))
    rows = (10 * rows).to(dtype)
    if odd is not None:
        rows[:, :, :, tokens // 2] = odd
    assert torch.equal(native.encode_keys(layout, rows), encode_keys(layout, rows))
