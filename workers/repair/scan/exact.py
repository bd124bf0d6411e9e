"""Scores of all of a session's tokens against a signal, in a scan that can be stopped at any time.

The attention to token i is `a_i = mean over layers and query heads of max over signal tokens t of
A[t, i]`, where A is the softmax over all rows of the session (RepairKV eq. 3). It is the score;
with a contrast the score is `max(0, a_i(signal) - beta * a_i(neutral))`, where a long signal counts
with what stands out from its other parts (`Signal.contrast`). Pages arrive in chunks, so
memory does not grow with the session except for vectors over its tokens.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvrecall.domain.session_settings import PageScan
from kvstore.index.arena import RowArena
from workers.cache.transfers import Transfers
from workers.primitives.observation import Observed
from workers.repair.scan.base import FindAmbiguous, Scan, ScanResult
from workers.repair.scan.bounded import bounded
from workers.repair.scan.pages import Chunk, Pages, PageSource
from workers.repair.scan.softmax import Contrast, HeadReduction, Normaliser, Signal

__all__ = [
    "Contrast",
    "FindAmbiguous",
    "HeadReduction",
    "ScanResult",
    "scan",
    "scan_by_head",
    "scan_copy_by_head",
]


def scan(
    store: PageSource,
    name: str,
    observed: Observed,
    length: int,
    *,
    contrast: Contrast | None = None,
    mode: PageScan,
    counted: Tensor | None,
    find_ambiguous: FindAmbiguous,
    stop_requested: Callable[[], bool],
    transfers: Transfers,
) -> Generator[None, None, ScanResult]:
    """Score a session's first `length` tokens; yields between chunks so that others can run.

    After a stop is requested, the result has the scores of the tokens reached so far, with the
    normaliser so far. Raises the errors of the store.

    Args:
        store: The row store.
        name: The session's name.
        observed: The signal's queries.
        length: Number of tokens to score.
        contrast: The neutral signal to subtract; None for the signal's attention itself.
        mode: "exact" reads every page twice. "summary" uses the midpoints of the codes as keys, and
            reads only pages without a summary. "bounded" reads pages until no token is ambiguous;
            its scores then lead to the same selection as the exact ones.
        counted: Rows that contribute to a score, bool `[n_layers, n_kv_heads, length]` on the
            device; None for all. The others only take part in the softmax.
        find_ambiguous: Returns the tokens that are ambiguous under bounds; used by "bounded".
        stop_requested: Returns True once the scan must end.
        transfers: Of the device of the computation.
    """
    signal = Signal(observed, store.layout.n_kv_heads, transfers.device, contrast)
    pages = Pages(store, name, length, signal, transfers)
    request = Scan(pages, signal, counted, stop_requested, transfers.device)
    if not length:
        return request.to_result(request.no_attention()[0], request.no_tokens(), True)
    if mode == "bounded":
        exact = partial(two_passes, request, approximate=False)
        result = yield from bounded(request, find_ambiguous, exact)
    else:
        result = yield from two_passes(request, approximate=mode == "summary")
    return replace(result, kind=mode)


def two_passes(scan: Scan, *, approximate: bool) -> Generator[None, None, ScanResult]:
    """Score all pages in two passes: best bound first with the normaliser so far, then in order.

    If the second pass is stopped, the scores of the first stand. The order of the second does not
    depend on summaries, so that the sums of a scan are always the same.
    """
    signal = scan.signal
    normalisers = [Normaliser(signal.queries(layer)) for layer in range(signal.n_layers)]
    attention = scan.no_attention()
    scored = scan.no_tokens()
    order = yield from scan.pages.best_first(scan.stop_requested)
    for pages in scan.pages.in_chunks(order):
        if scan.stop_requested():
            return scan.to_result(signal.contrast(attention), scored, False)
        for chunk in _load(scan, pages, approximate):
            for layer, normaliser in enumerate(normalisers):
                weights = normaliser.add(signal.logits(layer, chunk.get_layer(layer)))
                weights *= normaliser.total.reciprocal().float()
                counted = scan.get_counted(layer, chunk)
                attention[:, chunk.positions] += signal.attention(weights, counted)
            scored[chunk.positions] = True
        yield None
    final = scan.no_attention()
    for pages in scan.pages.in_chunks(range(scan.pages.count)):
        if scan.stop_requested():
            return scan.to_result(signal.contrast(attention), scored, False)
        for chunk in _load(scan, pages, approximate):
            for layer, normaliser in enumerate(normalisers):
                weights = normaliser.log_weights(signal.logits(layer, chunk.get_layer(layer)))
                counted = scan.get_counted(layer, chunk)
                final[:, chunk.positions] += signal.attention(weights, counted, logarithms=True)
        yield None
    return scan.to_result(signal.contrast(final), scored, True)


def _load(scan: Scan, pages: Sequence[int], approximate: bool) -> Iterator[Chunk]:
    return scan.pages.approximate(pages) if approximate else iter([scan.pages.read(pages)])


def scan_by_head(
    store: PageSource,
    name: str,
    observed: Observed,
    length: int,
    *,
    contrast: Contrast | None = None,
    reduction: HeadReduction = HeadReduction(),
    stop_requested: Callable[[], bool] = lambda: False,
    transfers: Transfers,
) -> Generator[None, None, ScanResult]:
    """Scan as `scan` with mode "exact", for every layer and KV head on its own.

    The scores are float32 `[n_layers, n_kv_heads, length]`: by default the mean over the head's
    group of the largest weight over the signal's tokens, less the neutral signal's in the same
    head. The tokens' scores, `tokens`, are those of the mean over layers and heads. Pages are read
    in order, and once if the logits of all fit into memory; the tokens that the second pass reached
    are scored.
    """
    signal = Signal(observed, store.layout.n_kv_heads, transfers.device, contrast)
    pages = Pages(store, name, length, signal, transfers)
    fits = signal.rows_at_once(length, layers=signal.n_layers) >= length
    weigh = _weigh_in_one_pass if fits else _weigh_in_two_passes
    weighed = weigh(signal, pages, causal=reduction.causal)
    result = yield from _score_by_head(signal, length, weighed, reduction, stop_requested)
    return replace(result, bytes_read=pages.bytes_read)


def scan_copy_by_head(
    rows: RowArena, signal: Signal, reduction: HeadReduction, transfers: Transfers
) -> Generator[None, None, ScanResult]:
    """Scan a copy of all rows in host memory as `scan_by_head` scans pages: no page is read.

    signal: on the device of `transfers`. Yields after each layer.
    """
    weighed = _weigh_copy(signal, rows, transfers, causal=reduction.causal)
    return (yield from _score_by_head(signal, rows.length, weighed, reduction, lambda: False))


# A layer, some of its rows, and the queries' attention to them, `[n_kv_heads, group * t, rows]`.
_Weighed = tuple[int, slice, Tensor]


def _score_by_head(
    signal: Signal,
    length: int,
    weighed: Iterator[_Weighed | None],
    reduction: HeadReduction,
    stop_requested: Callable[[], bool],
) -> Generator[None, None, ScanResult]:
    """Reduce weights to scores as they come; yields after each, until a stop is requested."""
    scores = torch.zeros(signal.n_layers, signal.n_kv_heads, length)
    means = torch.zeros(signal.groups, length)
    scored = torch.zeros(length, dtype=torch.bool)
    complete = True
    for part in weighed:
        if stop_requested():
            complete = False
            break
        if part is not None:
            layer, rows, weights = part
            attention = signal.head_attention(weights, reduction)
            scores[layer, :, rows] = signal.contrast(attention).cpu()
            means[:, rows] += attention.mean(1).cpu() / signal.n_layers
            scored[rows] |= layer == signal.n_layers - 1
        yield None
    return ScanResult(scores, scored, 0, complete, head_means=signal.contrast(means))


def _weigh_copy(
    signal: Signal, rows: RowArena, transfers: Transfers, *, causal: bool
) -> Iterator[_Weighed]:
    """Weigh the rows of one layer after the other, all at once if their logits fit into memory."""

    def compare(layer: int, part: slice) -> Tensor:
        (keys,) = transfers.to_device([rows.keys(layer)[:, part]])
        logits = signal.logits(layer, keys)
        if causal:
            signal.hide_later(logits, part.start)
        return logits

    at_once = signal.rows_at_once(rows.length)
    firsts = range(0, rows.length, at_once)
    parts = [slice(first, min(rows.length, first + at_once)) for first in firsts]
    for layer in range(signal.n_layers):
        if len(parts) == 1:
            yield layer, parts[0], compare(layer, parts[0]).softmax(-1)
            continue
        normaliser = Normaliser(signal.queries(layer))
        for part in parts:
            normaliser.add(compare(layer, part))
        for part in parts:
            yield layer, part, normaliser.weights(compare(layer, part))


def _weigh_in_one_pass(signal: Signal, pages: Pages, *, causal: bool) -> Iterator[_Weighed | None]:
    """Read every page once and keep the logits of all rows; yields None after each chunk."""
    queries = signal.queries(0)
    logits = queries.new_empty(signal.n_layers, *queries.shape[:2], pages.length)
    for indices in pages.in_chunks(range(pages.count)):
        chunk = pages.read(indices)
        for layer, of_layer in enumerate(logits):
            of_layer[..., pages.rows_of(indices)] = signal.logits(layer, chunk.get_layer(layer))
        yield None
    if causal:
        signal.hide_later(logits, 0)
    for layer, of_layer in enumerate(logits):
        yield layer, slice(0, pages.length), of_layer.softmax(-1)


def _weigh_in_two_passes(
    signal: Signal, pages: Pages, *, causal: bool
) -> Iterator[_Weighed | None]:
    """Read every page twice: for the normalisers, after which it yields None, and for the weights."""
    normalisers = [Normaliser(signal.queries(layer)) for layer in range(signal.n_layers)]
    for last_pass in (False, True):
        for indices in pages.in_chunks(range(pages.count)):
            rows = pages.rows_of(indices)
            chunk = pages.read(indices)
            for layer, normaliser in enumerate(normalisers):
                logits = signal.logits(layer, chunk.get_layer(layer))
                if causal:
                    signal.hide_later(logits, rows.start)
                if last_pass:
                    yield layer, rows, normaliser.weights(logits)
                else:
                    normaliser.add(logits)
            yield None
