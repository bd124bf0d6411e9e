"""A scan of the rows in host memory scores what queries find there, as an exact scan does."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
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
from workers.methods.repairkv import RepairKV
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.primitives.observation import Observed
from workers.repair.scan import indexed as module
from workers.repair.scan.base import ScanResult
from workers.repair.scan.best_rows import BestRows
from workers.repair.scan.exact import HeadReduction, scan, scan_by_head
from workers.repair.scan.indexed import IndexedScan, indexed, indexed_by_head
from workers.repair.scan.softmax import Contrast, Signal
from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.settings import Retrieval

EXACT = Retrieval(index="exact")
ALL = 1000
"""More rows than any session here has."""


def copied(keys: Tensor, settings: Retrieval = EXACT) -> IndexedRows:
    """Rows of keys `[n_layers, n_kv_heads, tokens, head_dim]` in host memory, with their index."""
    n_layers, n_kv_heads, _, head_dim = keys.shape
    rows = IndexedRows(PageLayout(n_layers, n_kv_heads, head_dim, keys.dtype, "keys"), settings)
    rows.append([(layer, layer) for layer in keys])
    list(rows.index_rows())
    return rows


def searched(
    rows: IndexedRows,
    observed: Observed,
    *,
    contrast: Contrast | None = None,
    counted: Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    found_rows: int = ALL,
) -> ScanResult:
    signal = Signal(observed, rows.arena.keys(0).shape[0], COPIES.device, contrast)
    given = IndexedScan(rows, signal, counted, stop_requested, found_rows=found_rows)
    return finished(indexed(given))


def half_counted(of: Given) -> Tensor:
    random = torch.Generator().manual_seed(of.keys.shape[2])
    return torch.rand(of.keys.shape[:3], generator=random) < 0.5


@settings(deadline=None, max_examples=100)
@given(of=inputs(), data=st.data())
def test_where_queries_find_every_row_it_chooses_what_an_exact_scan_chooses(
    of: Given, data: st.DataObject
) -> None:
    """For any contrast and counted rows, searched in one part or in many."""
    tokens = of.keys.shape[2]
    count = data.draw(st.integers(1, 12))
    counted = half_counted(of) if data.draw(st.booleans()) else None
    with stored(of.keys) as store:
        exact = scanned(store, of, tokens, "exact", counted=counted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOGITS", data.draw(st.sampled_from([1, 1 << 21])))
        patch.setattr(module, "_QUERIES", data.draw(st.sampled_from([1, 3, 512])))
        found = searched(copied(of.keys), of.observed, counted=counted)
    assert found.complete
    assert bool(found.scored.all())
    assert found.searched_share == 1
    assert torch.allclose(found.scores, exact.scores, rtol=1e-4, atol=1e-7)
    # Of tokens whose scores are equal but for rounding either may be chosen.
    expected = exact.scores[chosen(exact.scores, count)]
    assert torch.allclose(
        exact.scores[chosen(found.scores, count)].sort().values,
        expected.sort().values,
        rtol=1e-4,
        atol=1e-7,
    )


@settings(deadline=None, max_examples=60)
@given(of=inputs(), few=st.integers(1, 9), counts=st.booleans())
def test_tokens_that_a_query_finds_have_their_exact_score_and_others_none(
    of: Given, few: int, counts: bool
) -> None:
    """A token that is not found is below the last row found, in every head and for every query."""
    tokens = of.keys.shape[2]
    counted = half_counted(of) if counts else None
    found = searched(copied(of.keys), of.observed, counted=counted, found_rows=few)
    queries = of.queries.reshape(N_LAYERS, N_KV_HEADS, -1, HEAD_DIM) * HEAD_DIM**-0.5
    logits = queries @ of.keys.float().mT
    if counted is not None:
        logits = logits.masked_fill(~counted[:, :, None], -torch.inf)
    least = logits.topk(min(few, tokens)).values[..., -1:]
    surely = (logits > least + 1e-4).flatten(0, 2).any(0)
    perhaps = ((logits >= least - 1e-4) & (logits > -torch.inf)).flatten(0, 2).any(0)
    expected = of.scores(tokens, counted).float()
    assert torch.allclose(found.scores[surely], expected[surely], rtol=1e-4, atol=1e-7)
    assert not found.scores[~perhaps].any()
    assert bool(found.scored.all())


def neutral(of: Given, beta: float) -> Contrast:
    """Two queries that are none of the signal's, to subtract."""
    queries = of.queries.flip(2)[:, :, :2] * 0.5
    return Contrast(Observed(tuple(queries), torch.arange(queries.shape[2])), beta)


@settings(deadline=None, max_examples=40)
@given(of=inputs(), beta=st.sampled_from([0.5, 2.0]))
def test_a_contrast_is_subtracted_as_in_an_exact_scan(of: Given, beta: float) -> None:
    contrast = neutral(of, beta)
    with stored(of.keys) as store:
        exact = finished(
            scan(
                store,
                "s",
                of.observed,
                of.keys.shape[2],
                contrast=contrast,
                mode="exact",
                counted=None,
                find_ambiguous=best(1),
                stop_requested=lambda: False,
                transfers=COPIES,
            )
        )
    found = searched(copied(of.keys), of.observed, contrast=contrast)
    assert torch.allclose(found.scores, exact.scores, rtol=1e-3, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    of=inputs(),
    causal=st.booleans(),
    beta=st.sampled_from([0.0, 1.0]),
    at_once=st.sampled_from([1, 1 << 21]),
)
def test_heads_and_tokens_are_scored_as_an_exact_scan_scores_them(
    of: Given, causal: bool, beta: float, at_once: int
) -> None:
    """By the session's last tokens, which attend to none after themselves if they are rows."""
    contrast = neutral(of, beta) if beta else None
    length = of.keys.shape[2]
    count = min(length, of.queries.shape[2])
    observed = Observed(tuple(of.queries[:, :, -count:]), torch.arange(length - count, length))
    reduction = HeadReduction("mean", "max", causal=causal)
    rows = ("s", observed, length)
    with stored(of.keys) as store:
        exact = finished(
            scan_by_head(store, *rows, contrast=contrast, reduction=reduction, transfers=COPIES)
        )
    signal = Signal(observed, N_KV_HEADS, COPIES.device, contrast)
    given = IndexedScan(copied(of.keys), signal, causal=causal, found_rows=ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOGITS", at_once)
        found = finished(indexed_by_head(given, reduction))
    # Differences of nearly equal weights.
    assert torch.allclose(found.scores, exact.scores, rtol=1e-4, atol=1e-6 if beta else 1e-7)
    assert torch.allclose(found.tokens, exact.tokens, rtol=1e-4, atol=1e-6 if beta else 1e-7)
    assert found.complete


@settings(deadline=None, max_examples=40)
@given(of=inputs(), by_head=st.booleans())
def test_a_stopped_scan_reports_the_tokens_it_scored(of: Given, by_head: bool) -> None:
    """Stopped at every possible moment: the later, the more is scored; the last is complete."""
    rows = copied(of.keys)
    signal = Signal(of.observed, N_KV_HEADS, COPIES.device)
    found: list[ScanResult] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOGITS", 300)
        patch.setattr(module, "CHUNK_ROWS", 7)
        while not found or not found[-1].complete:
            given = IndexedScan(rows, signal, None, called_more_than(len(found)), found_rows=3)
            running = indexed_by_head(given, HeadReduction()) if by_head else indexed(given)
            found.append(finished(running))
    assert not found[0].scored.any()
    shares = [int(each.scored.sum()) for each in found]
    assert shares == sorted(shares)
    assert shares[-1] == of.keys.shape[2]
    whole = found[-1].scores
    for each in found:
        assert not each.scores[..., ~each.scored].any()
        assert torch.equal(each.scores[..., each.scored], whole[..., each.scored])


def test_what_a_query_attends_to_most_is_scored_first() -> None:
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(N_LAYERS, N_KV_HEADS, 900, HEAD_DIM, generator=random)
    queries = torch.randn(N_LAYERS, N_HEADS, 2, HEAD_DIM, generator=random)
    keys[1, 1, 700] = 4 * queries[1, 2, 1]
    of = Given(keys, queries)
    looks = 0

    def stop_requested() -> bool:
        nonlocal looks
        looks += 1
        return looks > N_LAYERS + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOGITS", 8 * 900)
        patch.setattr(module, "CHUNK_ROWS", 20)
        whole = searched(copied(keys), of.observed)
        found = searched(copied(keys), of.observed, stop_requested=stop_requested)
    assert int(found.scored.sum()) == 20
    assert int(found.scores.argmax()) == int(whole.scores.argmax()) == 700


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40), data=st.data())
def test_the_best_rows_of_all_parts_are_kept(seed: int, count: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=4))
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, sum(sizes), generator=random)
    kept = BestRows(count)
    positions = torch.arange(sum(sizes))
    for part, at in zip(logits.split(sizes, 2), positions.split(sizes), strict=True):
        kept.add(part.clone(), at)
    expected = logits.topk(min(count, sum(sizes))).indices
    assert torch.equal(kept.positions.sort().values, expected.sort().values)
    assert torch.equal(kept.logits, logits.gather(2, kept.positions))


def tree_keys(length: int = 6000) -> tuple[Tensor, Observed]:
    """Keys in clusters of similar ones, and queries near to some of these."""
    random = torch.Generator().manual_seed(4)
    centres = 3 * torch.randn(1, N_KV_HEADS, 40, HEAD_DIM, generator=random)
    keys = centres[:, :, torch.randint(40, (length,), generator=random)]
    keys = keys + 0.5 * torch.randn(keys.shape, generator=random)
    queries = centres[:, [0, 0, 1, 1], :3] + torch.randn(1, N_HEADS, 3, HEAD_DIM, generator=random)
    return keys, Observed(tuple(queries), torch.arange(3))


def test_with_a_tree_that_finds_all_rows_scores_are_exact() -> None:
    keys, observed = tree_keys()
    found = searched(copied(keys, Retrieval(index="tree", scan=1)), observed, found_rows=8000)
    expected = Given(keys, torch.stack(observed.queries)).scores(keys.shape[2]).float()
    assert found.searched_share == 1
    assert torch.allclose(found.scores, expected, rtol=1e-4, atol=1e-7)


def test_summaries_of_the_keys_leave_no_row_out() -> None:
    """They are for retrieval: a repair looks for single keys."""
    keys, observed = tree_keys()
    found = searched(copied(keys, Retrieval(index="summaries")), observed, found_rows=32)
    expected = searched(copied(keys), observed, found_rows=32)
    assert found.searched_share == 1
    assert torch.equal(found.scores, expected.scores)


def test_rows_that_a_tree_leaves_out_are_estimated_in_the_normaliser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores are nearly exact with a sample of the rows left out, and twice as large without."""
    monkeypatch.setattr(module, "RESERVOIR_ROWS", 1500)
    keys, observed = tree_keys()
    expected = Given(keys, torch.stack(observed.queries)).scores(keys.shape[2]).float()
    rows = copied(keys, Retrieval(index="tree", scan=0.01))
    found = searched(rows, observed, found_rows=32)
    assert found.searched_share < 0.7
    at = found.scores.topk(20).indices
    ratio = float((found.scores[at] / expected[at]).mean())
    assert ratio == pytest.approx(1, abs=0.1)
    assert torch.equal(searched(rows, observed, found_rows=32).scores, found.scores)
    monkeypatch.setattr(module, "RESERVOIR_ROWS", 1)
    alone = searched(rows, observed, found_rows=32)
    assert abs(float((alone.scores[at] / expected[at]).mean()) - 1) > 2 * abs(ratio - 1)


def test_on_a_models_own_keys_it_chooses_what_an_exact_scan_chooses(
    loaded: Callable[[str], LoadedModel],
    tokenizer: ChatTokenizer,
    open_store: Callable[..., RowStore],
) -> None:
    """A conversation of about 3,000 tokens, all active, and its questions."""
    model = loaded("reference")
    store = open_store(model)
    conversation = generate(0, 3000, split="held_out")
    segments = tokenizer.prompt([], conversation.messages(), [], False)
    token_ids = [token for segment in segments for token in segment.token_ids]
    engine = Engine(
        Parts(model, tokenizer, store, WorkerSettings(max_budget=8000, block_tokens=512))
    )
    spec = pb.SessionSpec(session="s", epoch=1, method="full", budget=8000)
    resident = engine.swap_in(engine.open(spec, pb.SessionState()))
    for block in torch.tensor(token_ids).split(512):
        engine.forward([resident], block[None])
    engine.store_io.flush(resident.session)
    engine.store_io.wait_written(resident.session)
    length = len(token_ids)
    rows = copied(store.gather("s", torch.arange(length))[:, 0])
    questions = [each.user for each in conversation.exchanges if each.kind == "question"][-12:]
    operator = RepairKV()
    candidates = torch.arange(length) >= 4
    shares = []
    for question in questions:
        observed = engine.observe(resident, tokenizer.encode(question))
        exact = scanned(
            store, Given(torch.empty(0), torch.stack(observed.queries)), length, "exact"
        )
        found = searched(rows, observed, found_rows=module.FOUND_ROWS)
        picked = [
            operator.choose(operator.utility(scores), candidates, torch.zeros(length), 64)
            for scores in (exact.scores, found.scores)
        ]
        shares.append(len(set(picked[0].tolist()) & set(picked[1].tolist())) / 64)
    engine.close()
    assert len(shares) == 12
    assert sum(shares) / len(shares) >= 0.99, shares
