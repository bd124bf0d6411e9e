"""Scores of all of a session's tokens against a signal, in a scan that can be stopped at any time.

The attention to token i is `a_i = mean over layers and query heads of max over signal tokens t of
A[t, i]`, where A is the softmax over all rows of the session (RepairKV eq. 3). It is the score;
with a contrast the score is `max(0, a_i(signal) - beta * a_i(neutral))`, where a long signal counts
with what stands out from its other parts (`Signal.contrast`). Keys arrive in chunks, so memory does
not grow with the session except for vectors over its tokens.
"""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from workers.repair.scan.keys import KeySource
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import Normaliser, Signal


def scan_tokens(
    keys: KeySource,
    signal: Signal,
    *,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Generator[None, None, ScanResult]:
    """Score all tokens in two passes over their keys; yields between chunks so that others can run.

    The first pass scores with the softmax's normaliser so far. After a stop is requested, the result
    has the tokens that it reached, with these scores. Raises the errors of the store.

    counted: rows that contribute to a score, bool `[n_layers, n_kv_heads, length]` on the device;
    None for all. The others only take part in the softmax.
    """
    normalisers = [Normaliser(signal.queries(layer)) for layer in range(signal.n_layers)]
    estimated = torch.zeros(signal.groups, keys.length, device=signal.device)
    scored = torch.zeros(keys.length, dtype=torch.bool)
    chunks = signal.split_rows(keys.length, keys.page_tokens)
    for rows in chunks:
        if stop_requested():
            return _build_result(signal, keys, estimated, scored, complete=False)
        for layer, layer_keys in enumerate(keys.read(rows)):
            weights = normalisers[layer].add(signal.logits(layer, layer_keys))
            weights *= normalisers[layer].total.reciprocal().float()
            estimated[:, rows] += signal.attention(weights, _of(counted, layer, rows))
        scored[rows] = True
        yield None
    attention = torch.zeros_like(estimated)
    for rows in chunks:
        if stop_requested():
            return _build_result(signal, keys, estimated, scored, complete=False)
        for layer, layer_keys in enumerate(keys.read(rows)):
            weights = normalisers[layer].log_weights(signal.logits(layer, layer_keys))
            counted_rows = _of(counted, layer, rows)
            attention[:, rows] += signal.attention(weights, counted_rows, logarithms=True)
        yield None
    return _build_result(signal, keys, attention, scored, complete=True)


def _of(counted: Tensor | None, layer: int, rows: slice) -> Tensor | None:
    return None if counted is None else counted[layer][:, rows]


def _build_result(
    signal: Signal, keys: KeySource, attention: Tensor, scored: Tensor, *, complete: bool
) -> ScanResult:
    return ScanResult(signal.score(attention).cpu(), scored, keys.bytes_read, complete)
