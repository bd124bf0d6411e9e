"""Scans score tokens against a signal; the bounded one reads less for the same selection."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.domain.session_settings import RepairScan
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from reference.conversation import generate
from workers.cache.transfers import Transfers
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.primitives.observation import Observed
from workers.repair.scan.exact import FindAmbiguous, ScanResult, scan, scan_by_head

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
def stored(keys: Tensor, *, page_tokens: int = 8, **options: Any) -> Iterator[RowStore]:
    """A store with keys (and zeros as values) in session "s", all pages written."""
    n_layers, n_kv_heads, _, head_dim = keys.shape
    layout = PageLayout(n_layers, n_kv_heads, head_dim, keys.dtype, "keys", page_tokens)
    store = RowStore(layout, [RamTier(1 << 30)], **options)
    store.append("s", torch.stack([keys, torch.zeros_like(keys)], 1))
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


def scanned(
    store: RowStore,
    of: Given,
    length: int,
    mode: RepairScan,
    find_ambiguous: FindAmbiguous | None = None,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> ScanResult:
    return finished(
        scan(
            store,
            "s",
            of.observed,
            length,
            mode=mode,
            counted=counted,
            find_ambiguous=find_ambiguous or best(1),
            stop_requested=stop_requested,
            transfers=COPIES,
        )
    )


def best(count: int) -> FindAmbiguous:
    """Tokens that may or may not have the `count` highest scores, ties to the earlier."""

    def find_ambiguous(lower: Tensor, upper: Tensor) -> Tensor:
        assert (lower <= upper).all()
        inside = torch.zeros(len(lower), dtype=torch.bool)
        inside[lower.sort(descending=True, stable=True).indices[:count]] = True
        if bool(inside.all()):
            return torch.zeros_like(inside)
        return (inside & (lower <= upper[~inside].max())) | (
            ~inside & (upper >= lower[inside].min())
        )

    return find_ambiguous


def chosen(scores: Tensor, count: int) -> list[int]:
    return scores.sort(descending=True, stable=True).indices[:count].sort().values.tolist()


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


@settings(deadline=None, max_examples=60)
@given(of=inputs(), data=st.data())
def test_exact_scores_are_those_of_the_definition(of: Given, data: st.DataObject) -> None:
    """For any summaries, any counted rows, and for the first tokens of a session as for all."""
    tokens = of.keys.shape[2]
    length = data.draw(st.integers(1, tokens))
    counted = None
    if data.draw(st.booleans()):
        counted = (
            torch.rand(*of.keys.shape[:2], length, generator=torch.Generator().manual_seed(tokens))
            < 0.5
        )
    with stored(of.keys, summary_limit=data.draw(st.sampled_from([0, 1000, 1 << 20]))) as store:
        if data.draw(st.booleans()):
            store.truncate("s", length)
        found = scanned(store, of, length, "exact", counted=counted)
    assert found.complete
    assert bool(found.scored.all())
    assert torch.allclose(found.scores.double(), of.scores(length, counted), rtol=1e-4, atol=1e-7)


@settings(deadline=None, max_examples=150)
@given(of=inputs(), data=st.data())
def test_bounded_leads_to_the_selection_of_exact(of: Given, data: st.DataObject) -> None:
    tokens = of.keys.shape[2]
    count = data.draw(st.integers(1, 12))
    limit = data.draw(st.sampled_from([0, 1500, 1 << 20]))
    bits = data.draw(st.sampled_from([4, 8, 12]))
    counted = None
    if data.draw(st.booleans()):
        counted = (
            torch.rand(*of.keys.shape[:2], tokens, generator=torch.Generator().manual_seed(tokens))
            < 0.5
        )
    with stored(of.keys, summary_limit=limit, summary_bits=bits) as store:
        exact = scanned(store, of, tokens, "exact", counted=counted)
        bounded = scanned(store, of, tokens, "bounded", best(count), counted=counted)
    assert bounded.complete
    assert bool(bounded.scored.all())
    assert chosen(bounded.scores, count) == chosen(exact.scores, count)


@settings(deadline=None, max_examples=100)
@given(of=inputs(), data=st.data())
def test_bounds_hold_at_every_step(of: Given, data: st.DataObject) -> None:
    """More tokens are ambiguous at every call, which checks the bounds."""
    tokens = of.keys.shape[2]
    bits = data.draw(st.sampled_from([4, 8, 12]))
    true = of.scores(tokens)
    widths: list[float] = []

    def find_ambiguous(lower: Tensor, upper: Tensor) -> Tensor:
        assert (lower.double() <= true * (1 + 1e-6)).all()
        assert (upper.double() >= true * (1 - 1e-6)).all()
        widths.append(float((upper - lower).sum()))
        return torch.arange(tokens) <= 2 * len(widths)

    with stored(of.keys, summary_bits=bits) as store:
        found = scanned(store, of, tokens, "bounded", find_ambiguous)
    assert torch.allclose(found.scores.double(), true, rtol=1e-4, atol=1e-7), (
        "it ended as an exact scan"
    )
    assert widths == sorted(widths, reverse=True)


def called_more_than(times: int) -> Callable[[], bool]:
    calls = iter(range(10**6))
    return lambda: next(calls) >= times


@settings(deadline=None, max_examples=40)
@given(of=inputs(), mode=st.sampled_from(["exact", "bounded", "summary"]), counts=st.booleans())
def test_a_stopped_scan_reports_the_tokens_it_scored(
    of: Given, mode: RepairScan, counts: bool
) -> None:
    """Stopped at every possible moment: the later, the more is scored; the last is complete."""
    tokens = of.keys.shape[2]
    counted = torch.ones(*of.keys.shape[:2], tokens, dtype=torch.bool) if counts else None
    with stored(of.keys) as store:
        found: list[ScanResult] = []
        moment = 0
        while not found or not found[-1].complete:
            stop_requested = called_more_than(moment)
            found.append(scanned(store, of, tokens, mode, best(3), counted, stop_requested))
            moment += 1
    assert not found[0].scored.any()
    shares = [int(each.scored.sum()) for each in found]
    assert shares == sorted(shares)
    assert shares[-1] == tokens
    for each in found:
        assert not each.scores[~each.scored].any()
        assert (each.scores[each.scored] <= 1.0001).all()


@settings(deadline=None, max_examples=30)
@given(of=inputs())
def test_heads_scores_add_up_to_their_tokens(of: Given) -> None:
    """Their mean over all heads is the token's; a stopped scan scores only reached tokens."""
    tokens = of.keys.shape[2]
    with stored(of.keys) as store:
        found = finished(
            scan_by_head(
                store, "s", of.observed, tokens, stop_requested=lambda: False, transfers=COPIES
            )
        )
        stopped = finished(
            scan_by_head(
                store, "s", of.observed, tokens, stop_requested=lambda: True, transfers=COPIES
            )
        )
    assert found.complete
    assert found.scores.shape == (N_LAYERS, N_KV_HEADS, tokens)
    assert torch.allclose(
        found.scores.mean((0, 1)).double(), of.scores(tokens), rtol=1e-4, atol=1e-7
    )
    assert not stopped.complete
    assert not stopped.scored.any()


def test_the_pages_that_the_signal_attends_to_are_scored_first(pages_of_noise: Given) -> None:
    """40 pages; the needle's page is visited in the first chunk although it is the last but one."""
    of = pages_of_noise
    with stored(of.keys, page_tokens=64) as store:
        looks = iter([False] * 3)
        found = scanned(
            store, of, of.keys.shape[2], "exact", stop_requested=lambda: next(looks, True)
        )
    assert 0 < int(found.scored.sum()) < of.keys.shape[2] / 2
    assert int(found.scores.argmax()) == 2500


def test_a_summary_scan_reads_only_pages_without_a_summary(pages_of_noise: Given) -> None:
    of = pages_of_noise
    page_bytes = 0
    with stored(of.keys, page_tokens=64) as store:
        found = scanned(store, of, of.keys.shape[2], "summary")
        assert found.bytes_read == 0
        assert torch.allclose(found.scores.double(), of.scores(of.keys.shape[2]), rtol=0.01)
        page_bytes = store.layout.page_bytes
        some = scanned(store, of, 2000, "summary")
        assert some.bytes_read == 2 * page_bytes, (
            "the page that ends after token 2,000, once for each pass"
        )
    with stored(of.keys, page_tokens=64, summary_limit=0) as store:
        found = scanned(store, of, of.keys.shape[2], "summary")
        assert found.bytes_read == 2 * 40 * page_bytes


def test_a_bounded_scan_reads_only_pages_of_ambiguous_tokens(pages_of_noise: Given) -> None:
    of = pages_of_noise
    with stored(of.keys, page_tokens=64, summary_bits=8) as store:
        assert scanned(store, of, of.keys.shape[2], "bounded", best(1)).bytes_read == 0
        asked = torch.zeros(of.keys.shape[2], dtype=torch.bool)
        asked[[10, 70, 71, 2000]] = True
        looks = iter([asked, asked, asked])
        nothing = torch.zeros_like(asked)
        found = scanned(
            store, of, of.keys.shape[2], "bounded", lambda low, high: next(looks, nothing)
        )
        assert found.bytes_read == 3 * store.layout.page_bytes
        assert found.complete
        exact = scanned(store, of, of.keys.shape[2], "exact")
        assert torch.allclose(found.scores[asked], exact.scores[asked], rtol=0.05)


def test_pages_without_a_summary_get_one_when_a_scan_reads_them(
    pages_of_noise: Given, tmp_path: Path
) -> None:
    of = pages_of_noise
    tokens = pages_of_noise.keys.shape[2]
    rows = torch.stack([of.keys, torch.zeros_like(of.keys)], 1)
    layout = PageLayout(N_LAYERS, N_KV_HEADS, HEAD_DIM, of.keys.dtype, "keys")
    first = RowStore(layout, [NvmeTier(tmp_path)])
    first.append("s", rows)
    first.close()
    second = RowStore(layout, [NvmeTier(tmp_path)])
    found = scanned(second, of, tokens, "bounded", best(1))
    assert found.bytes_read == 40 * layout.page_bytes, "once, for their summaries"
    assert scanned(second, of, tokens, "bounded", best(1)).bytes_read == 0
    second.close()


def test_an_empty_session_is_scored_at_once() -> None:
    of = Given(
        torch.zeros(N_LAYERS, N_KV_HEADS, 0, HEAD_DIM), torch.zeros(N_LAYERS, N_HEADS, 1, HEAD_DIM)
    )
    with stored(of.keys) as store:
        found = scanned(store, of, 0, "bounded")
    assert found.complete
    assert len(found.scores) == 0


def test_on_a_models_own_keys_a_bounded_scan_reads_little(
    loaded: Callable[[str], LoadedModel],
    tokenizer: ChatTokenizer,
    open_store: Callable[..., RowStore],
) -> None:
    """A conversation of about 4,000 tokens, all active, and one of its questions."""
    model = loaded("reference")
    store = open_store(loaded("reference"))
    conversation = generate(0, 4000, split="held_out")
    token_ids = [
        t
        for segment in tokenizer.prompt([], conversation.messages(), [], False)
        for t in segment.token_ids
    ]
    tokens = len(token_ids)
    engine = Engine(
        Parts(model, tokenizer, store, WorkerSettings(max_budget=8000, block_tokens=512))
    )
    session = engine.open(
        pb.SessionSpec(session="s", epoch=1, method="full", budget=8000), pb.SessionState()
    )
    resident = engine.swap_in(session)
    for block in torch.tensor(token_ids).split(512):
        engine.forward([resident], block[None])
    engine.store_io.flush(session)
    engine.store_io.wait_written(session)
    question = next(e.user for e in reversed(conversation.exchanges) if e.kind == "question")
    observed = engine.observe(resident, tokenizer.encode(question))
    engine.close()

    def run(mode: RepairScan, count: int) -> ScanResult:
        return finished(
            scan(
                store,
                "s",
                observed,
                tokens,
                mode=mode,
                counted=None,
                find_ambiguous=best(count),
                stop_requested=lambda: False,
                transfers=COPIES,
            )
        )

    exact = run("exact", 1)
    unfinished = store.layout.page_bytes - (64 - tokens % 64) * store.layout.token_bytes
    stored_bytes = tokens // 64 * store.layout.page_bytes + unfinished
    assert exact.bytes_read == 2 * stored_bytes
    shares = []
    for count in range(8, 56, 8):
        bounded = run("bounded", count)
        assert chosen(bounded.scores, count) == chosen(exact.scores, count)
        shares.append(bounded.bytes_read / stored_bytes)
    # If the last selected token and the next one have nearly equal scores, all pages are read.
    assert median(shares) < 0.1, shares


@pytest.fixture
def pages_of_noise() -> Given:
    """40 pages of 64 tokens, and one needle at 2,500."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 2560, HEAD_DIM, generator=random)
    queries = torch.randn(N_LAYERS, N_HEADS, 4, HEAD_DIM, generator=random)
    keys[1, 1, 2500] = 4 * queries[1, 2, 1]
    return Given(keys, queries)
