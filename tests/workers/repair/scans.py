"""Stored keys and signals that tests scan, and what they expect by the definition."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_ids
from workers.cache.transfers import Transfers
from workers.engine.host.cache import HostCache
from workers.generation.host_copy import PageTaker
from workers.primitives.observation import Observed
from workers.repair.scan.keys import CopiedKeys, KeySource, StoredKeys
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import Contrast, Signal
from workers.repair.scan.tokens import scan_tokens
from workers.retrieval.host_copy import HostCopy

COPIES = Transfers(torch.device("cpu"))
N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 2, 4, 2, 8


@dataclass(frozen=True)
class Given:
    """Stored keys and queries.

    keys: `[n_layers, n_kv_heads, tokens, head_dim]`; queries: `[n_layers, n_heads, t, head_dim]`.
    """

    keys: Tensor
    queries: Tensor

    @property
    def observed(self) -> Observed:
        return Observed(tuple(self.queries), torch.arange(self.queries.shape[2]))

    def scores(self, length: int, counted: Tensor | None = None) -> Tensor:
        """By the definition, in float64."""
        n_layers, n_heads, t, head_dim = self.queries.shape
        n_kv_heads = self.keys.shape[1]
        queries = self.queries.double().reshape(n_layers, n_kv_heads, -1, head_dim) * head_dim**-0.5
        attention = (queries @ self.keys[:, :, :length].double().transpose(2, 3)).softmax(-1)
        best = attention.view(n_layers, n_kv_heads, n_heads // n_kv_heads, t, length).amax(3).sum(2)
        if counted is not None:
            best = best * counted
        return best.sum((0, 1)) / (n_layers * n_heads)


@contextmanager
def stored(keys: Tensor, *, page_tokens: int = 8) -> Iterator[RowStore]:
    """A store with keys (and zeros as values) in session "s", all pages written."""
    n_layers, n_kv_heads, _, head_dim = keys.shape
    layout = PageLayout(n_layers, n_kv_heads, head_dim, keys.dtype, "keys", page_tokens)
    store = RowStore(layout, [RamTier(1 << 30)])
    ids = make_ids(range(keys.shape[2] // page_tokens))
    store.append("s", torch.stack([keys, torch.zeros_like(keys)], 1), ids)
    store.flush("s")
    yield store
    store.close()


def finished(running: Generator[None, None, ScanResult]) -> ScanResult:
    while True:
        try:
            next(running)
        except StopIteration as done:
            result: ScanResult = done.value
            return result


Place = Literal["pages", "copy"]
PLACES: tuple[Place, ...] = get_args(Place)
"""Where a scan reads the keys: in stored pages, or in a copy of the rows that it makes itself."""


def open_keys(store: RowStore, length: int, place: Place) -> KeySource:
    """Keys of session "s"."""
    if place == "pages":
        return StoredKeys(store, "s", length, COPIES)
    return open_copy(HostCopy(store.layout, None), store, length)


def open_copy(copy: HostCopy, store: RowStore, length: int) -> CopiedKeys:
    """Keys of session "s" in its copy."""
    assert store.memory is not None
    cache = HostCache(store.memory, store.layout.page_bytes)
    return CopiedKeys(copy, PageTaker(copy, cache, store, "s", length), COPIES)


def scanned(
    store: RowStore,
    of: Given,
    length: int,
    place: Place = "pages",
    *,
    contrast: Contrast | None = None,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> ScanResult:
    signal = Signal(of.observed, store.layout.n_kv_heads, COPIES.device, contrast)
    keys = open_keys(store, length, place)
    return finished(scan_tokens(keys, signal, counted=counted, stop_requested=stop_requested))


@st.composite
def inputs(draw: st.DrawFn) -> Given:
    """Clustered keys, some of them equal, and needles that one query matches."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    tokens = draw(st.integers(1, 90))
    t = draw(st.integers(1, 5))
    centres = torch.randn(N_LAYERS, N_KV_HEADS, 6, HEAD_DIM, generator=random)
    keys = centres[:, :, torch.randint(6, (tokens,), generator=random)]
    keys = keys + draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(keys.shape, generator=random)
    queries = torch.randn(N_LAYERS, N_HEADS, t, HEAD_DIM, generator=random) * draw(
        st.sampled_from([0.1, 1.0, 4.0])
    )
    for needle in draw(st.lists(st.integers(0, tokens - 1), max_size=4)):
        keys[-1, 0, needle] = 2 * queries[-1, 0, 0]
    if draw(st.booleans()):
        keys[:, :, tokens // 2 :] = keys[:, :, : tokens - tokens // 2].clone()
    return Given(
        keys.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))), queries
    )


def called_more_than(times: int) -> Callable[[], bool]:
    calls = iter(range(10**6))
    return lambda: next(calls) >= times
