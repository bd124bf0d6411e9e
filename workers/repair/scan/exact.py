"""Scores of all of a session's tokens against a signal, at whatever moment it has to end.

The score of token i is `a_i = mean over layers and query heads of max over signal tokens t of A[t, i]`, A the softmax
over all rows of the session (RepairKV eq. 3). Pages come one chunk at a time, so memory does not grow with the
session but for vectors over its tokens.
"""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from kvrecall.domain.session_settings import RepairScan
from kvstore.store import RowStore
from workers.primitives.observation import Observed
from workers.repair.scan.base import AmbiguousTokens, Scan, ScanResult
from workers.repair.scan.bounded import bounded
from workers.repair.scan.pages import Pages
from workers.repair.scan.softmax import Normaliser, Signal

__all__ = ["AmbiguousTokens", "ScanResult", "scan", "scan_by_head"]


def scan(
    store: RowStore,
    name: str,
    observed: Observed,
    length: int,
    *,
    mode: RepairScan,
    counted: Tensor | None,
    find_ambiguous: AmbiguousTokens,
    stop_requested: Callable[[], bool],
    device: torch.device,
) -> Generator[None, None, ScanResult]:
    """Score a session's first `length` tokens; yields between chunks, to let others run. Raises what the store raises.

    `exact` reads every page twice. `summary` takes the middles of the codes for keys, and reads pages without a summary
    alone. `bounded` reads pages until no doubt is left, and then gives scores that lead to the same choice as those of
    `exact`. `counted` says which rows have a part in a score, bool `[n_layers, n_kv_heads, length]` on the device, None
    for all; the others take their part of the softmax alone. Once it is `hurried` it ends with what it has: scores of
    the tokens that it has come to, with the normaliser so far.
    """
    pages = Pages(store, name, length, device)
    over = Scan(
        pages, Signal(observed, store.layout.n_kv_heads, device), counted, stop_requested, device
    )
    if not length:
        return over.to_result(over.zeros(), over.zeros().bool(), True)
    if mode == "bounded":
        return (yield from bounded(over, find_ambiguous, lambda: two_passes(over, coded=False)))
    return (yield from two_passes(over, coded=mode == "summary"))


def two_passes(over: Scan, *, coded: bool) -> Generator[None, None, ScanResult]:
    """All pages best bound first for the normaliser, scored with what it is so far; then all in order, with all of it.

    Hurried in the second pass, the scores of the first stand. The order of the second does not depend on summaries, so
    that a scan always sums alike.
    """
    normalisers = [Normaliser(queries) for queries in over.signal.queries]
    scores = over.zeros()
    scored = over.zeros().bool()
    order = yield from over.pages.best_first(over.signal, over.stop_requested)
    for pages in over.pages.in_chunks(order):
        if over.stop_requested():
            return over.to_result(scores, scored, False)
        for chunk in over.pages.coded(pages) if coded else [over.pages.read(pages)]:
            for layer, normaliser in enumerate(normalisers):
                weights = normaliser.add(over.signal.logits(layer, chunk.get_layer(layer)))
                weights /= normaliser.total
                scores[chunk.positions] += over.signal.scores(weights, over.counts(layer, chunk))
            scored[chunk.positions] = True
        yield None
    final = over.zeros()
    for pages in over.pages.in_chunks(range(over.pages.count)):
        if over.stop_requested():
            return over.to_result(scores, scored, False)
        for chunk in over.pages.coded(pages) if coded else [over.pages.read(pages)]:
            for layer, normaliser in enumerate(normalisers):
                weights = normaliser.weights(over.signal.logits(layer, chunk.get_layer(layer)))
                final[chunk.positions] += over.signal.scores(weights, over.counts(layer, chunk))
        yield None
    return over.to_result(final, scored, True)


def scan_by_head(
    store: RowStore,
    name: str,
    observed: Observed,
    length: int,
    *,
    stop_requested: Callable[[], bool],
    device: torch.device,
) -> Generator[None, None, ScanResult]:
    """`scan` with `exact`, for every layer and KV head on its own: scores float32 `[n_layers, n_kv_heads, length]`.

    A score is the mean over the head's group of the largest weight over the signal's tokens. Pages come in order; those
    that the second pass has come to are scored.
    """
    pages = Pages(store, name, length, device)
    signal = Signal(observed, store.layout.n_kv_heads, device)
    normalisers = [Normaliser(queries) for queries in signal.queries]
    scores = torch.zeros(signal.n_layers, signal.n_kv_heads, length)
    scored = torch.zeros(length, dtype=torch.bool)
    for indices in pages.in_chunks(range(pages.count)):
        if stop_requested():
            return ScanResult(scores, scored, pages.bytes_read, False)
        chunk = pages.read(indices)
        for layer, normaliser in enumerate(normalisers):
            normaliser.add(signal.logits(layer, chunk.get_layer(layer)))
        yield None
    for indices in pages.in_chunks(range(pages.count)):
        if stop_requested():
            return ScanResult(scores, scored, pages.bytes_read, False)
        chunk = pages.read(indices)
        where = chunk.positions.cpu()
        for layer, normaliser in enumerate(normalisers):
            weights = normaliser.weights(signal.logits(layer, chunk.get_layer(layer)))
            scores[layer, :, where] = signal.by_head(weights).cpu()
        scored[where] = True
        yield None
    return ScanResult(scores, scored, pages.bytes_read, True)
