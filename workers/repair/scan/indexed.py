"""The scan of the session's rows in host memory: finds each query's best rows, and scores these.

Exact scans read every page twice, since attention needs the softmax's normaliser first. Here one
search of each layer gives both the normaliser and the rows that a query attends to most: one pass
over contiguous keys, or where the layer has an index one over its candidates. Only tokens that some
query found are scored, by the logits of all queries in all layers; the others have the score 0: in
every head their attention is below that of the last row found.

Source: IceCache for the index; the repair through it is ours.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.repair.key_chunks import CHUNK_ROWS
from workers.repair.scan.base import ScanResult
from workers.repair.scan.best_rows import BestRows
from workers.repair.scan.softmax import HeadReduction, Normaliser, Signal
from workers.retrieval.indexed_rows import IndexedRows

# Rows that each query finds in its head: 8 choose as an exact scan does (docs/repair.md).
FOUND_ROWS = 32
# Rows per layer that stand for those that an index left out.
RESERVOIR_ROWS = 4096
# Logits that are computed at once: a search goes over them several times, in the cache of the CPU.
_LOGITS = 1 << 21
# Queries of a KV head that are searched at once.
_QUERIES = 512


@dataclass(frozen=True, eq=False)
class IndexedScan:
    """The input of a scan through the index.

    Attributes:
        rows: The session's rows.
        signal: The queries to score against, on the host.
        counted: Rows that contribute to a score, bool `[n_layers, n_kv_heads, length]` on the host;
            None for all.
        stop_requested: Returns True once the scan must end.
        seed: Of the sample of rows that stand for those that an index left out.
        causal: Queries are rows, and attend to none after themselves.
        found_rows: Rows that each query finds in its head.
    """

    rows: IndexedRows
    signal: Signal
    counted: Tensor | None = None
    stop_requested: Callable[[], bool] = lambda: False
    seed: int = 0
    causal: bool = False
    found_rows: int = FOUND_ROWS

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.rows.arena.length


def indexed(scan: IndexedScan) -> Generator[None, None, ScanResult]:
    """Score the tokens as an exact scan does, those that no query finds with 0.

    Yields between parts of a layer. Once a stop is requested the tokens scored so far are scored:
    none before all layers were searched, then those that some query attends to most first.
    """
    signal = scan.signal
    attention = torch.zeros(signal.groups, scan.length)

    def add(layer: int, positions: Tensor, weights: Tensor) -> None:
        counted = None if scan.counted is None else scan.counted[layer][:, positions]
        attention[:, positions] += signal.attention(weights, counted)

    scored, complete, share = yield from _score(scan, add)
    return ScanResult(signal.contrast(attention), scored, 0, complete, share, "index")


def indexed_by_head(
    scan: IndexedScan, reduction: HeadReduction
) -> Generator[None, None, ScanResult]:
    """Score as `indexed`, for every layer and KV head on its own.

    Scores are float32 `[n_layers, n_kv_heads, length]`, and `tokens` those of the heads' mean.
    """
    signal = scan.signal
    scores = torch.zeros(signal.n_layers, signal.n_kv_heads, scan.length)
    means = torch.zeros(signal.groups, scan.length)

    def add(layer: int, positions: Tensor, weights: Tensor) -> None:
        attention = signal.head_attention(weights, reduction)
        scores[layer, :, positions] = signal.contrast(attention)
        means[:, positions] += attention.mean(1) / signal.n_layers

    scored, complete, share = yield from _score(scan, add)
    return ScanResult(scores, scored, 0, complete, share, "index", signal.contrast(means))


def _score(
    scan: IndexedScan, add: Callable[[int, Tensor, Tensor], None]
) -> Generator[None, None, tuple[Tensor, bool, float]]:
    """Search all layers, then pass the weights of the tokens that were found to `add`.

    `add` gets a layer, int64 positions `[rows]` that ascend, and the weights of all queries there,
    `[n_kv_heads, group * t, rows]`. Returns the scored tokens, bool `[length]`, False if the scan
    was stopped, and the share of the rows whose key was compared.
    """
    signal = scan.signal
    scored = torch.zeros(scan.length, dtype=torch.bool)
    search = _Search(scan)
    for layer in range(signal.n_layers):
        for _ in search.layer(layer):
            yield None
            if scan.stop_requested():
                return scored, False, search.share
    found = (search.strongest >= 0).nonzero().flatten()
    found = found[search.strongest[found].argsort(descending=True, stable=True)]
    for part in torch.split(found, signal.rows_at_once(CHUNK_ROWS)):
        if scan.stop_requested():
            return scored, False, search.share
        positions = part.sort().values
        for layer, normaliser in enumerate(search.log_normalisers):
            logits = signal.logits(layer, scan.rows.arena.keys(layer)[:, positions])
            if scan.causal:
                signal.hide_later(logits, positions)
            add(layer, positions, logits.sub_(normaliser).exp_())
        scored[positions] = True
        yield None
    scored[:] = True
    return scored, True, search.share


class _Search:
    """The search of all layers: normalisers, and the tokens that were found.

    Attributes:
        log_normalisers: Per layer searched, float32 `[n_kv_heads, group * t, 1]`.
        strongest: The largest attention with which a token was found, float32 `[length]`; -1 for
            one that was not.
    """

    def __init__(self, scan: IndexedScan) -> None:
        self._scan = scan
        self.log_normalisers: list[Tensor] = []
        self.strongest = torch.full((scan.length,), -1.0)
        self._compared = 0
        self._comparable = 0
        random = torch.Generator().manual_seed(scan.seed)
        self._sample = torch.randperm(scan.length, generator=random)[:RESERVOIR_ROWS].sort().values

    @property
    def share(self) -> float:
        """Share of the rows whose key was compared so far."""
        return self._compared / max(1, self._comparable)

    def layer(self, layer: int) -> Iterator[None]:
        """Search a layer; yields between parts of it."""
        queries = self._scan.signal.queries(layer)
        normalisers = []
        for first in range(0, queries.shape[1], _QUERIES):
            some = slice(first, first + _QUERIES)
            normaliser = Normaliser(queries[:, some])
            best = BestRows(self._scan.found_rows)
            for part in self._parts(layer, queries[:, some]):
                logits = self._compare(layer, some, part)
                if not part.estimates:
                    self._take_best(layer, best, logits, part.positions)
                normaliser.add(logits)
                yield None
            normalisers.append(normaliser.log())
            strongest = best.logits.sub_(normalisers[-1]).exp_().masked_fill_(best.none, -1.0)
            self.strongest.scatter_reduce_(0, best.positions.flatten(), strongest.flatten(), "amax")
        self.log_normalisers.append(torch.cat(normalisers, 1))

    def _parts(self, layer: int, queries: Tensor) -> Iterator["_Part"]:
        """The rows of a layer that some of its queries are compared to, in parts."""
        length = self._scan.length
        heads, count, _ = queries.shape
        at_once = max(1, _LOGITS // (heads * count))
        candidates = self._scan.rows.candidates(layer, queries)
        self._comparable += heads * length
        if candidates is None:
            self._compared += heads * length
            for positions in torch.split(torch.arange(length), at_once):
                yield _Part(positions)
            return
        self._compared += int((candidates >= 0).sum())
        for part in torch.split(candidates, at_once, 1):
            yield _Part(part, torch.zeros(part.shape).masked_fill_(part < 0, -torch.inf))
        if candidates.shape[1] < length:
            yield self._stand_for_others(candidates)

    def _stand_for_others(self, candidates: Tensor) -> "_Part":
        """The sampled rows that are no candidates, by the number of rows that each stands for.

        The sum over them, each counted so often, estimates the sum over all rows that an index left
        out without bias.

        Source: Horvitz and Thompson, "A Generalization of Sampling Without Replacement" (1952).
        """
        heads, length = len(candidates), self._scan.length
        marks = torch.zeros(heads, length + 1, dtype=torch.bool)
        marks.scatter_(1, candidates.where(candidates >= 0, length), True)
        sampled = ~marks[:, self._sample]
        count = sampled.sum(1, keepdim=True)
        self._compared += int(count.sum())
        left_out = length - (candidates >= 0).sum(1, keepdim=True)
        stands_for = (left_out / count.clamp(min=1)).log()
        bias = torch.where(sampled, stands_for, -torch.inf)
        return _Part(self._sample.expand(heads, -1), bias, estimates=True)

    def _compare(self, layer: int, some: slice, part: "_Part") -> Tensor:
        """Logits of a layer's queries `some` for a part of the rows: `[n_kv_heads, q, rows]`."""
        arena, at = self._scan.rows.arena, part.positions
        consecutive = at.dim() == 1
        rows = arena.keys(layer)[:, at[0] : at[-1] + 1] if consecutive else None
        keys = arena.gather_keys(layer, at) if rows is None else rows
        logits = self._scan.signal.logits(layer, keys, some)
        if self._scan.causal:
            self._scan.signal.hide_later(logits, int(at[0]) if consecutive else at, some)
        return logits if part.bias is None else logits.add_(part.bias[:, None])

    def _take_best(self, layer: int, best: BestRows, logits: Tensor, positions: Tensor) -> None:
        """Add a part's rows to the best ones, those that contribute to a score."""
        if self._scan.counted is not None:
            counted = self._scan.counted[layer]
            at = positions.clamp(min=0).expand(len(counted), -1)
            logits = logits.masked_fill(~counted.gather(1, at)[:, None], -torch.inf)
        best.add(logits, positions)


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows that queries are compared to.

    Attributes:
        positions: Of consecutive rows, int64 `[rows]`; or of each head's own, `[n_kv_heads, rows]`,
            -1 for none.
        bias: What is added to their logits, float32 `[n_kv_heads, rows]`; None: nothing.
        estimates: The rows stand for others in the normaliser, and are not found themselves.
    """

    positions: Tensor
    bias: Tensor | None = None
    estimates: bool = False
