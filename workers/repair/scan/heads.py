"""Scores of all of a session's rows against a signal, in every layer and KV head on its own."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvstore.index.paged_rows import PagedRows
from workers.cache.transfers import Transfers
from workers.repair.scan.keys import KeySource
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import HeadReduction, Normaliser, Signal


def scan_heads(
    keys: KeySource,
    signal: Signal,
    reduction: HeadReduction = HeadReduction(),
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Generator[None, None, ScanResult]:
    """Scan as `scan_tokens`, for every layer and KV head on its own.

    The scores are float32 `[n_layers, n_kv_heads, length]`: by default the mean over the head's
    group of the largest weight over the signal's tokens, less the neutral signal's in the same
    head. The tokens' scores, `tokens`, are those of the mean over layers and heads. Keys are read
    once if the logits of all fit into memory, else twice; the tokens that the second pass reached
    are scored.
    """
    fits = signal.rows_at_once(keys.length, layers=signal.n_layers) >= keys.length
    weigh = _weigh_in_one_pass if fits else _weigh_in_two_passes
    weighed = weigh(signal, keys, causal=reduction.causal)
    result = yield from _score(signal, keys.length, weighed, reduction, stop_requested)
    return replace(result, bytes_read=keys.bytes_read)


def scan_copy(
    rows: PagedRows, signal: Signal, reduction: HeadReduction, transfers: Transfers
) -> Generator[None, None, ScanResult]:
    """Scan a whole copy of the rows in host memory as `scan_heads`, one layer after the other.

    signal: on the device of `transfers`. Yields after each layer.
    """
    weighed = _weigh_copy(signal, rows, transfers, causal=reduction.causal)
    return (yield from _score(signal, rows.length, weighed, reduction, lambda: False))


# A layer, some of its rows, and the queries' attention to them, `[n_kv_heads, group * t, rows]`.
_Weighed = tuple[int, slice, Tensor]


def _score(
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
    return ScanResult(scores, scored, 0, complete, head_means=signal.score(means))


def _weigh_copy(
    signal: Signal, rows: PagedRows, transfers: Transfers, *, causal: bool
) -> Iterator[_Weighed]:
    """Weigh the rows of one layer after the other, all at once if their logits fit into memory."""

    def compare(layer: int, part: slice) -> Tensor:
        (keys,) = transfers.to_device([rows.keys(layer, part)])
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


def _weigh_in_one_pass(
    signal: Signal, keys: KeySource, *, causal: bool
) -> Iterator[_Weighed | None]:
    """Read every key once and keep the logits of all rows; yields None after each chunk."""
    queries = signal.queries(0)
    logits = queries.new_empty(signal.n_layers, *queries.shape[:2], keys.length)
    for rows in signal.split_rows(keys.length, keys.page_tokens):
        for layer, layer_keys in enumerate(keys.read(rows)):
            logits[layer][..., rows] = signal.logits(layer, layer_keys)
        yield None
    if causal:
        signal.hide_later(logits, 0)
    for layer, of_layer in enumerate(logits):
        yield layer, slice(0, keys.length), of_layer.softmax(-1)


def _weigh_in_two_passes(
    signal: Signal, keys: KeySource, *, causal: bool
) -> Iterator[_Weighed | None]:
    """Read every key twice: for the normalisers, after which it yields None, and for the weights."""
    normalisers = [Normaliser(signal.queries(layer)) for layer in range(signal.n_layers)]
    for last_pass in (False, True):
        for rows in signal.split_rows(keys.length, keys.page_tokens):
            for layer, layer_keys in enumerate(keys.read(rows)):
                logits = signal.logits(layer, layer_keys)
                if causal:
                    signal.hide_later(logits, rows.start)
                if last_pass:
                    yield layer, rows, normalisers[layer].weights(logits)
                else:
                    normalisers[layer].add(logits)
            yield None
