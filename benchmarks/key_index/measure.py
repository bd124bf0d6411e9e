"""Times of an index and what it finds, as rows of the result file."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.key_index.keys import KeySet
from kvrecall.reporting.results import Row, bootstrap, quality_row, speed_row
from kvstore.index.base import KeyIndex

TOP = 64
# Rows that attention reads in all, with the first and the last rows of the session.
ATTENDED = 256
SINKS = 4
RECENT = 32
# Rows at most that are inserted page by page, into an empty index.
_INSERTED = 16_384
_PAGE = 16


def measure(keys: KeySet, name: str, make: Callable[[], KeyIndex], seed: int) -> Iterator[Row]:
    """Rows of one index over one set of keys: times are CPU time of one thread, per layer."""
    condition = f"{keys.name}, {keys.rows} rows"
    common = {"method": name, "rows": keys.rows}
    indexes = []
    builds = []
    for layer in keys.keys:
        index = make()
        builds.append(clock(lambda index=index, layer=layer: index.extend(layer)))  # type: ignore[misc]
        index.check()
        indexes.append(index)
    yield speed_row(condition, "build of a layer", "seconds", builds, **common)
    insert = insertion(make(), keys.keys[0])
    yield speed_row(condition, "insertion per row and head", "microseconds", [insert], **common)
    heads = keys.keys.shape[1]
    size = indexes[0].nbytes / keys.rows / heads
    yield speed_row(condition, "memory per row and head", "bytes", [size], **common)
    yield from measure_searches(keys, indexes, condition, common, seed)


def measure_searches(
    keys: KeySet, indexes: list[KeyIndex], condition: str, common: dict[str, Any], seed: int
) -> Iterator[Row]:
    """Times of a search for one token, with and without exact logits, and what was found."""
    found: list[Found] = []
    alone: list[float] = []
    searches, totals = [], []
    for index, layer, asked in zip(indexes, keys.keys, keys.queries, strict=True):
        index.candidates(asked[0])
        for queries in asked:
            began = time.process_time()
            candidates = index.candidates(queries)
            searches.append(1e6 * (time.process_time() - began))
            find_top(layer, queries, candidates)
            totals.append(1e6 * (time.process_time() - began))
            found.append(Found(layer, queries, candidates))
            for query in torch.split(queries, 1, dim=1):
                alone += Found(layer, query, index.candidates(query)).recall()
    yield speed_row(condition, "search of a layer", "microseconds", searches, **common)
    yield speed_row(condition, f"search and top {TOP} of a layer", "microseconds", totals, **common)
    qualities = {
        f"recall@{TOP}": [value for each in found for value in each.recall()],
        f"recall@{TOP}, a query at a time": alone,
        f"attention held by {ATTENDED} rows": [value for each in found for value in each.mass()],
        "share of rows": [value for each in found for value in each.share()],
    }
    for metric, values in qualities.items():
        estimate = bootstrap(values, seed, draws=200)
        assert estimate, "a set of keys has queries"
        yield quality_row(f"{condition}: {metric}", estimate, metric=metric, **common)


class Found:
    """What an index found for a token's queries, beside the exact logits."""

    def __init__(self, keys: Tensor, queries: Tensor, candidates: Tensor) -> None:
        self._logits = queries @ keys.transpose(1, 2)
        heads, rows = keys.shape[:2]
        marks = torch.zeros(heads, rows + 1, dtype=torch.bool)
        marks.scatter_(1, candidates.where(candidates >= 0, rows), True)
        self._marks = marks[:, :rows]
        self._scale = keys.shape[-1] ** -0.5

    def recall(self) -> list[float]:
        """Share of each query's best rows that are candidates."""
        best = self._logits.topk(TOP, dim=-1).indices
        marks = self._marks[:, None].expand(self._logits.shape)
        return _to_list(marks.gather(2, best).float().mean(-1))

    def mass(self) -> list[float]:
        """Attention weight of each query's best candidates, the first and the last rows."""
        logits = self._logits.masked_fill(~self._marks[:, None], -torch.inf)
        logits[..., :SINKS] = logits[..., -RECENT:] = torch.inf
        rows = logits.topk(ATTENDED, dim=-1).indices
        weights = (self._logits * self._scale).softmax(-1)
        kept = logits.gather(2, rows) > -torch.inf
        return _to_list((weights.gather(2, rows) * kept).sum(-1))

    def share(self) -> list[float]:
        """Share of each head's rows that are candidates."""
        return _to_list(self._marks.float().mean(-1))


def find_top(keys: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    """Exact logits of the candidates, and the best of each query; int64 `[n_kv_heads, q, k]`."""
    if candidates.shape[1] == keys.shape[1]:
        return (queries @ keys.transpose(1, 2)).topk(TOP, dim=-1).indices
    chosen = torch.stack(
        [
            rows.index_select(0, index.clamp_min(0))
            for rows, index in zip(keys, candidates, strict=True)
        ]
    )
    logits = queries @ chosen.transpose(1, 2)
    logits = logits.masked_fill((candidates < 0)[:, None], -torch.inf)
    best = logits.topk(TOP, dim=-1).indices
    return candidates[:, None].expand(logits.shape).gather(2, best)


def insertion(index: KeyIndex, keys: Tensor) -> float:
    """Microseconds per row and head of adding the first 16,384 rows in pages of 16."""
    heads = len(keys)
    rows = min(_INSERTED, keys.shape[1])

    def insert() -> None:
        for end in range(_PAGE, rows + 1, _PAGE):
            index.extend(keys[:, :end])

    return 1e6 * clock(insert) / heads / rows


def clock(work: Callable[[], None]) -> float:
    """Seconds of CPU time."""
    began = time.process_time()
    work()
    return time.process_time() - began


def _to_list(values: Tensor) -> list[float]:
    return [float(value) for value in values.flatten()]
