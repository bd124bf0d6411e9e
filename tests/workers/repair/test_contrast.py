"""A contrast subtracts what a neutral signal attends to, in the one scan of the signal's queries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.domain.session_settings import PageScan
from tests.workers.repair.scans import (
    COPIES,
    HEAD_DIM,
    N_HEADS,
    N_KV_HEADS,
    N_LAYERS,
    Given,
    best,
    called_more_than,
    chosen,
    finished,
    inputs,
    stored,
)
from workers.repair.scan import softmax
from workers.repair.scan.exact import Contrast, FindAmbiguous, ScanResult, scan, scan_by_head
from workers.repair.scan.softmax import PART_TOKENS


@dataclass(frozen=True)
class Contrasted:
    """Keys and queries, the queries of a neutral signal, and the weight of its attention.

    `part_tokens`: the most tokens of one part of the signal.
    """

    of: Given
    neutral: Given
    beta: float
    part_tokens: int = PART_TOKENS

    @property
    def contrast(self) -> Contrast:
        return Contrast(self.neutral.observed, self.beta)

    def scores(self, counted: Tensor | None = None) -> Tensor:
        """By the definition, in float64."""
        tokens = self.of.keys.shape[2]
        t = self.of.queries.shape[2]
        count = -(-t // self.part_tokens)
        bounds = [t * part // count for part in range(count + 1)]
        parts = [
            Given(self.of.keys, self.of.queries[:, :, start:end]).scores(tokens, counted)
            for start, end in pairwise(bounds)
        ]
        signal = torch.stack(parts).amax(0)
        if len(parts) > 1:
            signal = signal - torch.stack(parts).mean(0)
        return (signal - self.beta * self.neutral.scores(tokens, counted)).clamp_min(0)


@st.composite
def contrasted(draw: st.DrawFn) -> Contrasted:
    """A neutral signal that attends to some of what the signal does, or to all of it."""
    of = draw(inputs())
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    t = draw(st.integers(1, 4))
    queries = torch.randn(N_LAYERS, N_HEADS, t, HEAD_DIM, generator=random)
    if draw(st.booleans()):
        queries[:, :, 0] = of.queries[:, :, 0]
    if draw(st.integers(0, 4)) == 0:
        queries = of.queries.clone()
    beta = draw(st.sampled_from([0.5, 1.0, 2.0]))
    part_tokens = draw(st.sampled_from([1, 2, PART_TOKENS]))
    return Contrasted(of, Given(of.keys, queries), beta, part_tokens)


@contextmanager
def parts_of(tokens: int) -> Iterator[None]:
    """Cut signals into parts of at most so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "PART_TOKENS", tokens)
        yield


def scanned(
    case: Contrasted,
    mode: PageScan,
    find_ambiguous: FindAmbiguous | None = None,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    **options: Any,
) -> ScanResult:
    with stored(case.of.keys, **options) as store, parts_of(case.part_tokens):
        return finished(
            scan(
                store,
                "s",
                case.of.observed,
                case.of.keys.shape[2],
                contrast=case.contrast,
                mode=mode,
                counted=counted,
                find_ambiguous=find_ambiguous or best(1),
                stop_requested=stop_requested,
                transfers=COPIES,
            )
        )


def some_counted(case: Contrasted) -> Tensor:
    random = torch.Generator().manual_seed(case.of.keys.shape[2])
    return torch.rand(case.of.keys.shape[:3], generator=random) < 0.5


@settings(deadline=None, max_examples=60)
@given(case=contrasted(), counts=st.booleans())
def test_exact_scores_are_the_clamped_difference(case: Contrasted, counts: bool) -> None:
    counted = some_counted(case) if counts else None
    found = scanned(case, "exact", counted=counted)
    assert found.complete
    assert torch.allclose(found.scores.double(), case.scores(counted), rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=150)
@given(case=contrasted(), counts=st.booleans(), data=st.data())
def test_bounded_leads_to_the_selection_of_exact(
    case: Contrasted, counts: bool, data: st.DataObject
) -> None:
    """Also where fewer tokens than are wanted have a score above 0: ties go to the earlier."""
    count = data.draw(st.integers(1, 12))
    limit = data.draw(st.sampled_from([0, 1500, 1 << 20]))
    bits = data.draw(st.sampled_from([4, 8, 12]))
    counted = some_counted(case) if counts else None
    exact = scanned(case, "exact", counted=counted)
    bounded = scanned(
        case, "bounded", best(count), counted, host_cache_bytes=limit, summary_bits=bits
    )
    assert bounded.complete
    assert bool(bounded.scored.all())
    assert chosen(bounded.scores, count) == chosen(exact.scores, count)


@settings(deadline=None, max_examples=100)
@given(case=contrasted(), bits=st.sampled_from([4, 8, 12]))
def test_bounds_hold_at_every_step(case: Contrasted, bits: int) -> None:
    """More tokens are ambiguous at every call, which checks the bounds and reads more pages."""
    true = case.scores()
    tokens = len(true)
    slack = 1e-6 * (case.of.scores(tokens) + case.beta * case.neutral.scores(tokens))
    widths: list[float] = []

    def find_ambiguous(lower: Tensor, upper: Tensor) -> Tensor:
        assert (lower >= 0).all()
        assert (lower <= upper).all()
        assert (lower.double() <= true + slack).all()
        assert (upper.double() >= true - slack).all()
        widths.append(float((upper - lower).sum()))
        return torch.arange(tokens) <= 2 * len(widths)

    scanned(case, "bounded", find_ambiguous, summary_bits=bits)
    rounding = 2 * float(slack.sum())
    assert all(after <= before + rounding for before, after in pairwise(widths))


@settings(deadline=None, max_examples=30)
@given(case=contrasted(), mode=st.sampled_from(["exact", "bounded", "summary"]))
def test_a_stopped_scan_has_contrast_scores_of_the_tokens_it_scored(
    case: Contrasted, mode: PageScan
) -> None:
    found: list[ScanResult] = []
    while not found or not found[-1].complete:
        found.append(scanned(case, mode, best(3), stop_requested=called_more_than(len(found))))
    shares = [int(each.scored.sum()) for each in found]
    assert shares == sorted(shares)
    for each in found:
        assert (each.scores >= 0).all()
        assert not each.scores[~each.scored].any()


@settings(deadline=None, max_examples=30)
@given(case=contrasted())
def test_heads_scores_are_clamped_differences_of_their_own(case: Contrasted) -> None:
    with stored(case.of.keys) as store:
        rows = (store, "s", case.of.observed, case.of.keys.shape[2])
        options: dict[str, Any] = {"stop_requested": lambda: False, "transfers": COPIES}
        found = finished(scan_by_head(*rows, contrast=case.contrast, **options))
        signal = finished(scan_by_head(*rows, **options))
        neutral = finished(scan_by_head(store, "s", case.neutral.observed, rows[3], **options))
    expected = (signal.scores - case.beta * neutral.scores).clamp_min(0)
    assert found.scores.shape == (N_LAYERS, N_KV_HEADS, rows[3])
    assert torch.allclose(found.scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["exact", "bounded", "summary"])
def test_both_signals_share_one_read(mode: PageScan) -> None:
    """A contrast reads no page more than the signal alone where bounds decide as easily."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 2560, HEAD_DIM, generator=random)
    queries = torch.randn(N_LAYERS, N_HEADS, 4, HEAD_DIM, generator=random)
    keys[1, 1, 2500] = 4 * queries[1, 2, 1]
    neutral = torch.randn(N_LAYERS, N_HEADS, 3, HEAD_DIM, generator=random)
    of = Given(keys, queries)
    case = Contrasted(of, Given(keys, neutral), 1.0)
    found = scanned(case, mode, page_tokens=64)
    with stored(keys, page_tokens=64) as store:
        alone = finished(
            scan(
                store,
                "s",
                of.observed,
                2560,
                mode=mode,
                counted=None,
                find_ambiguous=best(1),
                stop_requested=lambda: False,
                transfers=COPIES,
            )
        )
    assert found.bytes_read == alone.bytes_read
    assert int(found.scores.argmax()) == 2500


def test_what_the_neutral_signal_attends_to_as_much_is_nobodys_anchor() -> None:
    """One token that every query matches, and one that only the signal's matches."""
    keys = torch.zeros(N_LAYERS, N_KV_HEADS, 40, HEAD_DIM)
    keys[..., 7, 0] = 9
    keys[..., 20, 1] = 8
    queries = torch.zeros(N_LAYERS, N_HEADS, 2, HEAD_DIM)
    queries[:, :, :, 0] = 3
    queries[:, :, 1, 1] = 3
    neutral = queries[:, :, :1]
    case = Contrasted(Given(keys, queries), Given(keys, neutral), 1.0)
    assert int(case.of.scores(40).argmax()) == 7
    found = scanned(case, "exact")
    assert int(found.scores.argmax()) == 20
    assert found.scores[7] == 0


@pytest.mark.parametrize("mode", ["exact", "bounded", "summary"])
def test_what_every_part_of_a_long_signal_attends_to_is_nobodys_anchor(mode: PageScan) -> None:
    """Each part attends to token 7 most; one of them attends to token 20 as well, a little less."""
    keys = torch.zeros(N_LAYERS, N_KV_HEADS, 40, HEAD_DIM)
    keys[..., 7, 0] = 9
    keys[..., 20, 1] = 8
    queries = torch.zeros(N_LAYERS, N_HEADS, 6, HEAD_DIM)
    queries[:, :, ::2, 0] = 3
    queries[:, :, 3, 1] = 3
    neutral = torch.zeros(N_LAYERS, N_HEADS, 1, HEAD_DIM)
    whole = Contrasted(Given(keys, queries), Given(keys, neutral), 1.0)
    assert int(scanned(whole, mode).scores.argmax()) == 7
    assert int(scanned(replace(whole, part_tokens=2), mode).scores.argmax()) == 20
