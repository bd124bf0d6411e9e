"""The rows of a session in host memory, exact scans of them, and the signals of repairs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from benchmarks.key_index.keys import LATER, capture
from benchmarks.repair import run_to_end
from benchmarks.repair_keys import SINKS, SyntheticKeys
from evals.harness import load
from kvstore.format.page import PageLayout
from kvstore.format.summaries import PageSummary
from kvstore.index.arena import RowArena
from kvstore.sessions.gather import ReadKeys
from reference.conversation import generate
from workers.cache.active_cache import KVShape
from workers.cache.transfers import Transfers
from workers.methods.repairkv import RepairKV
from workers.primitives.observation import Observed
from workers.repair.scan.base import ScanResult
from workers.repair.scan.exact import scan
from workers.repair.scan.indexed import IndexedScan, indexed
from workers.repair.scan.softmax import Signal
from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.settings import Retrieval

RECENT = 32
# Tokens of a signal.
SIGNAL_TOKENS = 16
# One layer with half of the heads of Qwen2.5-7B, the shape of the made-up keys.
LAYER = KVShape(n_layers=1, n_heads=14, n_kv_heads=2, head_dim=128)
_TRANSFERS = Transfers(torch.device("cpu"))


class Session:
    """A session's rows in host memory, and the signals of its repairs.

    Attributes:
        name: Whose keys they are.
        arena: The rows; keys serve as values, which no scan reads.
        signals: The queries of each repair.
    """

    def __init__(self, name: str, keys: Iterable[Tensor], signals: Sequence[Observed]) -> None:
        """Copy keys, in pieces of float32 `[n_layers, n_kv_heads, rows, head_dim]`."""
        self.name = name
        self.signals = tuple(signals)
        pieces = iter(keys)
        first = next(pieces)
        layers, heads, _, head_dim = first.shape
        self.layout = PageLayout(layers, heads, head_dim, first.dtype, "benchmark")
        self.arena = RowArena(self.layout)
        for piece in chain([first], pieces):
            self.arena.append([(layer, layer) for layer in piece])

    @property
    def length(self) -> int:
        """Rows per layer and head."""
        return self.arena.length

    def runs(self, signal: Observed) -> int:
        """How often a scan for a signal is timed: of many equal signals each once."""
        alike = [each for each in self.signals if each.tokens == signal.tokens]
        return 3 if signal is self.signals[0] and len(alike) == 1 else 1

    def rows(self, settings: Retrieval) -> IndexedRows:
        """The rows, without an index so far."""
        rows = IndexedRows(self.layout, settings)
        rows.arena = self.arena
        return rows

    def exact(self, signal: Observed) -> ScanResult:
        """Run the exact scan of stored pages, which reads each twice, over the rows in memory."""
        running = scan(
            _Pages(self.layout, self.arena),
            "s",
            signal,
            self.length,
            mode="exact",
            counted=None,
            find_ambiguous=lambda lower, upper: torch.zeros(len(lower), dtype=torch.bool),
            stop_requested=lambda: False,
            transfers=_TRANSFERS,
        )
        return run_to_end(running)

    def choose(self, found: ScanResult, count: int) -> set[int]:
        """The `count` tokens that a repair brings back where all but a few are evicted."""
        operator = RepairKV()
        scores = found.scores.clone()
        scores[:SINKS] = 0
        candidates = torch.zeros(self.length, dtype=torch.bool)
        candidates[SINKS:-RECENT] = True
        tie_break = torch.zeros(self.length)
        chosen = operator.choose(operator.utility(scores), candidates, tie_break, count)
        return set(chosen.tolist())


@dataclass(frozen=True)
class _Pages:
    """The pages of rows in memory, without summaries."""

    layout: PageLayout
    arena: RowArena

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Return copies of the keys of pages, as a tier in memory does."""
        size = self.layout.page_tokens
        keys = [self.arena.keys(layer) for layer in range(self.layout.n_layers)]
        found = [
            torch.stack([of[:, page * size : (page + 1) * size] for of in keys]) for page in pages
        ]
        return ReadKeys(found, 0)

    def summaries(self, session: str, pages: Sequence[int]) -> list[PageSummary | None]:
        """None of any page."""
        return [None] * len(pages)


def search(rows: IndexedRows, signal: Observed, found_rows: int) -> ScanResult:
    """Run the scan of rows in memory."""
    heads = rows.arena.keys(0).shape[0]
    given = IndexedScan(rows, Signal(signal, heads, torch.device("cpu")), found_rows=found_rows)
    return run_to_end(indexed(given))


def reference_sessions(rows: int, seeds: Sequence[int]) -> Iterator[Session]:
    """The reference model's keys in all layers; signals are the next 256 tokens, 16 at a time."""
    loaded = load("reference")
    shape = loaded.model.shape
    for seed in seeds:
        conversation = generate(seed, rows + LATER + 4096, split="held_out")
        segments = loaded.tokenizer.prompt([], conversation.messages(), [], False)
        token_ids = [token for segment in segments for token in segment.token_ids]
        every = range(shape.n_layers)
        made = capture("reference", loaded.model, token_ids, rows, LATER, every)
        by_head = made.queries.permute(0, 2, 3, 1, 4).flatten(1, 2)
        signals = tuple(
            Observed(tuple(part), torch.arange(SIGNAL_TOKENS))
            for part in torch.split(by_head, SIGNAL_TOKENS, dim=2)
        )
        yield Session("reference", [made.keys], signals)


def made_up_session(rows: int, seed: int) -> Session:
    """One layer of made-up keys; its signal first, then each quarter of it."""
    made = SyntheticKeys(LAYER, torch.float32, seed, SIGNAL_TOKENS)
    whole = made.observed
    quarters = [
        Observed(tuple(layer[:, at : at + 4] for layer in whole.queries), torch.arange(4))
        for at in range(0, SIGNAL_TOKENS, 4)
    ]
    return Session("made-up", _joined(made.keys(rows)), (whole, *quarters))


def _joined(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces of at least 65,536 rows, but for the last: an arena that grows copies all of them."""
    found = list[Tensor]()
    for piece in pieces:
        found.append(piece)
        if sum(each.shape[2] for each in found) >= 65_536:
            yield torch.cat(found, 2)
            found.clear()
    if found:
        yield torch.cat(found, 2)
