"""Scans score tokens against a signal, equally over stored pages and over a copy of the rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.methods import Reduction
from tests.workers.repair.scans import (
    COPIES,
    HEAD_DIM,
    N_HEADS,
    N_KV_HEADS,
    N_LAYERS,
    PLACES,
    Given,
    Place,
    called_more_than,
    finished,
    inputs,
    open_copy,
    open_keys,
    scanned,
    stored,
)
from workers.primitives.observation import Observed
from workers.primitives.scoring import attention_scores
from workers.repair.scan import softmax
from workers.repair.scan.heads import scan_copy, scan_heads
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import Contrast, HeadReduction, Signal
from workers.repair.scan.tokens import scan_tokens
from workers.retrieval.host_copy import HostCopy

PAGE = 8


def half_counted(of: Given, length: int) -> Tensor:
    random = torch.Generator().manual_seed(of.keys.shape[2])
    return torch.rand(*of.keys.shape[:2], length, generator=random) < 0.5


@settings(deadline=None, max_examples=60)
@given(of=inputs(), data=st.data(), place=st.sampled_from(PLACES))
def test_scores_are_those_of_the_definition(of: Given, data: st.DataObject, place: Place) -> None:
    """For any counted rows, and for the first tokens of a session as for all."""
    tokens = of.keys.shape[2]
    length = data.draw(st.integers(1, tokens))
    truncates = length >= PAGE and data.draw(st.booleans())
    length -= length % PAGE if truncates else 0
    counted = half_counted(of, length) if data.draw(st.booleans()) else None
    with stored(of.keys) as store:
        if truncates:
            store.truncate("s", length)
        found = scanned(store, of, length, place, counted=counted)
    assert found.complete
    assert bool(found.scored.all())
    assert torch.allclose(found.scores.double(), of.scores(length, counted), rtol=1e-4, atol=1e-7)


@settings(deadline=None, max_examples=150)
@given(of=inputs(), data=st.data())
def test_a_copy_of_the_rows_leads_to_the_selection_of_their_pages(
    of: Given, data: st.DataObject
) -> None:
    """For any counted rows, with and without a contrast, compared at once or few at a time."""
    tokens = of.keys.shape[2]
    counted = half_counted(of, tokens) if data.draw(st.booleans()) else None
    queries = of.queries.flip(2)[:, :, :2] * 0.5
    neutral = Observed(tuple(queries), torch.arange(queries.shape[2]))
    contrast = Contrast(neutral, 2.0) if data.draw(st.booleans()) else None
    most_logits = data.draw(st.sampled_from([1, 500, softmax._MAX_LOGITS]))
    with stored(of.keys) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "_MAX_LOGITS", most_logits)
        pages, copy = (
            scanned(store, of, tokens, place, counted=counted, contrast=contrast)
            for place in PLACES
        )
    assert torch.equal(copy.scores, pages.scores)
    assert torch.equal(copy.scored, pages.scored)


@settings(deadline=None, max_examples=40)
@given(of=inputs(), place=st.sampled_from(PLACES), counts=st.booleans())
def test_a_stopped_scan_reports_the_tokens_it_scored(of: Given, place: Place, counts: bool) -> None:
    """Stopped at every possible moment: the later, the more is scored; the last is complete."""
    tokens = of.keys.shape[2]
    counted = torch.ones(*of.keys.shape[:2], tokens, dtype=torch.bool) if counts else None
    with stored(of.keys) as store:
        found: list[ScanResult] = []
        moment = 0
        while not found or not found[-1].complete:
            stop_requested = called_more_than(moment)
            found.append(
                scanned(store, of, tokens, place, counted=counted, stop_requested=stop_requested)
            )
            moment += 1
    assert not found[0].scored.any()
    shares = [int(each.scored.sum()) for each in found]
    assert shares == sorted(shares)
    assert shares[-1] == tokens
    for each in found:
        assert not each.scores[~each.scored].any()
        assert (each.scores[each.scored] <= 1.0001).all()


@settings(deadline=None, max_examples=30)
@given(of=inputs(), place=st.sampled_from(PLACES))
def test_heads_scores_add_up_to_their_tokens(of: Given, place: Place) -> None:
    """Their mean over all heads is the token's; a stopped scan scores only reached tokens."""
    tokens = of.keys.shape[2]
    signal = Signal(of.observed, N_KV_HEADS, COPIES.device)
    with stored(of.keys) as store:
        found = finished(scan_heads(open_keys(store, tokens, place), signal))
        keys = open_keys(store, tokens, place)
        stopped = finished(scan_heads(keys, signal, stop_requested=lambda: True))
    assert found.complete
    assert found.scores.shape == (N_LAYERS, N_KV_HEADS, tokens)
    assert torch.allclose(
        found.scores.mean((0, 1)).double(), of.scores(tokens), rtol=1e-4, atol=1e-7
    )
    assert not stopped.complete
    assert not stopped.scored.any()


@settings(deadline=None, max_examples=30)
@given(of=inputs(), beta=st.sampled_from([0.5, 2.0]))
def test_tokens_of_a_scan_by_head_are_contrasted_as_tokens_without_the_heads(
    of: Given, beta: float
) -> None:
    """The heads' scores are contrasted each on its own."""
    length = of.keys.shape[2]
    queries = of.queries.flip(2)[:, :, :2] * 0.5
    other = Observed(tuple(queries), torch.arange(queries.shape[2]))
    plain, neutral = (Contrast(other, each) for each in (0.0, beta))
    with stored(of.keys) as store:
        tokens = scanned(store, of, length, contrast=neutral)
        less, without = (
            finished(
                scan_heads(
                    open_keys(store, length, "pages"),
                    Signal(of.observed, N_KV_HEADS, COPIES.device, contrast),
                )
            )
            for contrast in (neutral, plain)
        )
    assert torch.allclose(less.tokens, tokens.scores, rtol=1e-3, atol=1e-6)
    assert bool((less.scores <= without.scores + 1e-6).all())


@settings(deadline=None, max_examples=30)
@given(of=inputs(), tokens=st.sampled_from(["mean", "max"]), group=st.sampled_from(["mean", "max"]))
def test_queries_that_are_rows_attend_to_none_after_themselves(
    of: Given, tokens: Reduction, group: Reduction
) -> None:
    """The last tokens' queries, reduced over them and over a head's group.

    Over pages and over a copy of their rows, read once or twice.
    """
    length = of.keys.shape[2]
    count = min(length, of.queries.shape[2])
    at = torch.arange(length - count, length)
    observed = Observed(tuple(of.queries[:, :, -count:]), at)
    reduction = HeadReduction(tokens, group, causal=True)
    signal = Signal(observed, N_KV_HEADS, COPIES.device)
    results = []
    with stored(of.keys) as store, pytest.MonkeyPatch.context() as patch:
        copy = build_copy(store.layout, None, [(keys, keys) for keys in of.keys]).rows
        for most_logits in (softmax._MAX_LOGITS, 1):
            patch.setattr(softmax, "_MAX_LOGITS", most_logits)
            results += [
                finished(scan_heads(open_keys(store, length, "pages"), signal, reduction)),
                finished(scan_copy(copy, signal, reduction, COPIES)),
            ]
    positions = torch.arange(length).expand(N_KV_HEADS, -1)
    for layer in range(N_LAYERS):
        expected = attention_scores(
            observed.queries[layer], of.keys[layer], positions, at, tokens=tokens, group=group
        )
        for found in results:
            assert torch.allclose(found.scores[layer], expected, rtol=1e-4, atol=1e-7)
    for found in results:
        assert found.complete
        assert bool(found.scored.all())
        assert torch.allclose(found.tokens, results[0].tokens, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("place", PLACES)
def test_an_empty_session_is_scored_at_once(place: Place) -> None:
    of = Given(
        torch.zeros(N_LAYERS, N_KV_HEADS, 0, HEAD_DIM), torch.zeros(N_LAYERS, N_HEADS, 1, HEAD_DIM)
    )
    with stored(of.keys) as store:
        found = scanned(store, of, 0, place)
    assert found.complete
    assert len(found.scores) == 0


def test_pages_are_read_in_both_passes_and_a_copy_is_made_once() -> None:
    """40 pages of 64 tokens; a copy is made in the first pass, and kept for later scans."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 2560, HEAD_DIM, generator=random)
    of = Given(keys, torch.randn(N_LAYERS, N_HEADS, 4, HEAD_DIM, generator=random))
    signal = Signal(of.observed, N_KV_HEADS, COPIES.device)
    with stored(of.keys, page_tokens=64) as store:
        assert scanned(store, of, 2560).bytes_read == 2 * 40 * store.layout.page_bytes
        copy = HostCopy(store.layout, None)
        read = [
            finished(scan_tokens(open_copy(copy, store, length), signal)).bytes_read
            for length in (2000, 2560, 2560)
        ]
        page = 64 * store.layout.token_bytes
        assert read == [32 * page, 8 * page, 0]


def test_tokens_are_scored_in_order_with_the_normaliser_so_far() -> None:
    """Stopped after one chunk of 16 rows; the sinks, which are the first rows, are among them."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 90, HEAD_DIM, generator=random)
    of = Given(keys, torch.randn(N_LAYERS, N_HEADS, 4, HEAD_DIM, generator=random))
    looks = iter([False])
    with stored(of.keys) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "CHUNK_ROWS", 16)
        found = scanned(store, of, 90, stop_requested=lambda: next(looks, True))
    assert found.scored.nonzero().flatten().tolist() == list(range(16))
    assert torch.allclose(found.scores[:16].double(), of.scores(16), rtol=1e-4, atol=1e-7)
