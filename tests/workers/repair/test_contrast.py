"""A contrast subtracts what a neutral signal attends to, in the one scan of the signal's queries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.repair import scans
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
    open_keys,
    stored,
)
from workers.repair.scan import softmax
from workers.repair.scan.heads import scan_heads
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import PART_TOKENS, Contrast, Signal


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
    place: Place = "pages",
    *,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    page_tokens: int = 8,
) -> ScanResult:
    with stored(case.of.keys, page_tokens=page_tokens) as store, parts_of(case.part_tokens):
        return scans.scanned(
            store,
            case.of,
            case.of.keys.shape[2],
            place,
            contrast=case.contrast,
            counted=counted,
            stop_requested=stop_requested,
        )


def some_counted(case: Contrasted) -> Tensor:
    random = torch.Generator().manual_seed(case.of.keys.shape[2])
    return torch.rand(case.of.keys.shape[:3], generator=random) < 0.5


@settings(deadline=None, max_examples=60)
@given(case=contrasted(), counts=st.booleans(), place=st.sampled_from(PLACES))
def test_scores_are_the_clamped_difference(case: Contrasted, counts: bool, place: Place) -> None:
    counted = some_counted(case) if counts else None
    found = scanned(case, place, counted=counted)
    assert found.complete
    assert torch.allclose(found.scores.double(), case.scores(counted), rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(case=contrasted(), place=st.sampled_from(PLACES))
def test_a_stopped_scan_has_contrast_scores_of_the_tokens_it_scored(
    case: Contrasted, place: Place
) -> None:
    found: list[ScanResult] = []
    while not found or not found[-1].complete:
        found.append(scanned(case, place, stop_requested=called_more_than(len(found))))
    shares = [int(each.scored.sum()) for each in found]
    assert shares == sorted(shares)
    for each in found:
        assert (each.scores >= 0).all()
        assert not each.scores[~each.scored].any()


@settings(deadline=None, max_examples=30)
@given(case=contrasted())
def test_heads_scores_are_clamped_differences_of_their_own(case: Contrasted) -> None:
    length = case.of.keys.shape[2]
    signals = {
        "contrasted": Signal(case.of.observed, N_KV_HEADS, COPIES.device, case.contrast),
        "signal": Signal(case.of.observed, N_KV_HEADS, COPIES.device),
        "neutral": Signal(case.neutral.observed, N_KV_HEADS, COPIES.device),
    }
    with stored(case.of.keys) as store:
        found, signal, neutral = (
            finished(scan_heads(open_keys(store, length, "pages"), each))
            for each in signals.values()
        )
    expected = (signal.scores - case.beta * neutral.scores).clamp_min(0)
    assert found.scores.shape == (N_LAYERS, N_KV_HEADS, length)
    assert torch.allclose(found.scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_both_signals_share_one_read(place: Place) -> None:
    """A contrast reads no page more than the signal alone."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 2560, HEAD_DIM, generator=random)
    queries = torch.randn(N_LAYERS, N_HEADS, 4, HEAD_DIM, generator=random)
    keys[1, 1, 2500] = 4 * queries[1, 2, 1]
    neutral = torch.randn(N_LAYERS, N_HEADS, 3, HEAD_DIM, generator=random)
    of = Given(keys, queries)
    case = Contrasted(of, Given(keys, neutral), 1.0)
    found = scanned(case, place, page_tokens=64)
    with stored(keys, page_tokens=64) as store:
        alone = scans.scanned(store, of, 2560, place)
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
    found = scanned(case)
    assert int(found.scores.argmax()) == 20
    assert found.scores[7] == 0


@pytest.mark.parametrize("place", PLACES)
def test_what_every_part_of_a_long_signal_attends_to_is_nobodys_anchor(place: Place) -> None:
    """Each part attends to token 7 most; one of them attends to token 20 as well, a little less."""
    keys = torch.zeros(N_LAYERS, N_KV_HEADS, 40, HEAD_DIM)
    keys[..., 7, 0] = 9
    keys[..., 20, 1] = 8
    queries = torch.zeros(N_LAYERS, N_HEADS, 6, HEAD_DIM)
    queries[:, :, ::2, 0] = 3
    queries[:, :, 3, 1] = 3
    neutral = torch.zeros(N_LAYERS, N_HEADS, 1, HEAD_DIM)
    whole = Contrasted(Given(keys, queries), Given(keys, neutral), 1.0)
    assert int(scanned(whole, place).scores.argmax()) == 7
    assert int(scanned(replace(whole, part_tokens=2), place).scores.argmax()) == 20
