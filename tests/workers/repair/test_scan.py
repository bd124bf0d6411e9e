"""Scans score tokens against a signal; the bounded one reads less for the same selection."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.domain.session_settings import PageScan
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.index.arena import RowArena
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from reference.conversation import generate
from tests.workers.repair.scans import (
    COPIES,
    HEAD_DIM,
    N_HEADS,
    N_KV_HEADS,
    N_LAYERS,
    Given,
    best,
    called_more_than,
    chosen,
    finished,
    inputs,
    scanned,
    stored,
)
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.primitives.observation import Observed
from workers.primitives.scoring import Reduction, attention_scores
from workers.repair.scan import softmax
from workers.repair.scan.exact import (
    Contrast,
    HeadReduction,
    ScanResult,
    scan,
    scan_by_head,
    scan_copy_by_head,
)
from workers.repair.scan.softmax import Signal


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
    with stored(of.keys, host_cache_bytes=data.draw(st.sampled_from([0, 1000, 1 << 20]))) as store:
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
    with stored(of.keys, host_cache_bytes=limit, summary_bits=bits) as store:
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
    rounding = 2e-6 * float(true.sum())
    assert all(after <= before + rounding for before, after in pairwise(widths))


@settings(deadline=None, max_examples=40)
@given(of=inputs(), mode=st.sampled_from(["exact", "bounded", "summary"]), counts=st.booleans())
def test_a_stopped_scan_reports_the_tokens_it_scored(
    of: Given, mode: PageScan, counts: bool
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


@settings(deadline=None, max_examples=30)
@given(of=inputs(), beta=st.sampled_from([0.5, 2.0]))
def test_tokens_of_a_scan_by_head_are_contrasted_as_tokens_without_the_heads(
    of: Given, beta: float
) -> None:
    """The heads' scores are contrasted each on its own."""
    length = of.keys.shape[2]
    queries = of.queries.flip(2)[:, :, :2] * 0.5
    other = Observed(tuple(queries), torch.arange(queries.shape[2]))
    plain, neutral = (Contrast(other, each) for each in (0.0, beta))
    rows = ("s", of.observed, length)
    with stored(of.keys) as store:
        tokens = finished(
            scan(
                store,
                *rows,
                contrast=neutral,
                mode="exact",
                counted=None,
                find_ambiguous=best(1),
                stop_requested=lambda: False,
                transfers=COPIES,
            )
        )
        less, without = (
            finished(scan_by_head(store, *rows, contrast=contrast, transfers=COPIES))
            for contrast in (neutral, plain)
        )
    assert torch.allclose(less.tokens, tokens.scores, rtol=1e-3, atol=1e-6)
    assert bool((less.scores <= without.scores + 1e-6).all())


@settings(deadline=None, max_examples=30)
@given(of=inputs(), tokens=st.sampled_from(["mean", "max"]), group=st.sampled_from(["mean", "max"]))
def test_queries_that_are_rows_attend_to_none_after_themselves(
    of: Given, tokens: Reduction, group: Reduction
) -> None:
    """The last tokens' queries, reduced over them and over a head's group.

    Over pages and over a copy of their rows, read once or twice.
    """
    length = of.keys.shape[2]
    count = min(length, of.queries.shape[2])
    at = torch.arange(length - count, length)
    observed = Observed(tuple(of.queries[:, :, -count:]), at)
    reduction = HeadReduction(tokens, group, causal=True)
    signal = Signal(observed, N_KV_HEADS, COPIES.device)
    results = []
    with stored(of.keys) as store, pytest.MonkeyPatch.context() as patch:
        copy = RowArena(store.layout)
        copy.append([(keys, keys) for keys in of.keys])
        for most_logits in (softmax._MAX_LOGITS, 1):
            patch.setattr(softmax, "_MAX_LOGITS", most_logits)
            results += [
                finished(
                    scan_by_head(
                        store, "s", observed, length, reduction=reduction, transfers=COPIES
                    )
                ),
                finished(scan_copy_by_head(copy, signal, reduction, COPIES)),
            ]
    positions = torch.arange(length).expand(N_KV_HEADS, -1)
    for layer in range(N_LAYERS):
        expected = attention_scores(
            observed.queries[layer], of.keys[layer], positions, at, tokens=tokens, group=group
        )
        for found in results:
            assert torch.allclose(found.scores[layer], expected, rtol=1e-4, atol=1e-7)
    for found in results:
        assert found.complete
        assert bool(found.scored.all())
        assert torch.allclose(found.tokens, results[0].tokens, rtol=1e-4, atol=1e-7)


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
    with stored(of.keys, page_tokens=64, host_cache_bytes=0) as store:
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

    def run(mode: PageScan, count: int) -> ScanResult:
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
