"""What a retriever finds, against brute force; a pass over several sessions against each alone."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from benchmarks.made_up_copy import add_rows
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from kvstore.index.dci.tree import DciTree
from kvstore.index.paged_rows import PagedRows
from kvstore.index.summaries import KeySummaries
from workers.cache.active_cache import EMPTY
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.retrieval.host_copy import HostCopy
from workers.retrieval.indexes import create_index, index_bytes
from workers.retrieval.retriever import Retriever
from workers.retrieval.step import RetrievalStep

HEADS, GROUP, DIM = 2, 3, 8
MOST_EXACT = 1 << 16
LAYOUT = PageLayout(
    n_layers=1, n_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, fingerprint="m"
)
CPU = Transfers(torch.device("cpu"))


def make_retriever(settings: Retrieval, count: int, layout: PageLayout = LAYOUT) -> Retriever:
    return Retriever(HostCopy(layout, settings), settings, count)


def retriever(length: int, count: int, seed: int = 0) -> Retriever:
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, length, DIM, generator=random)
    made = make_retriever(Retrieval(index="exact", choice="best"), count)
    add_rows(made.copy, [(keys, values)])
    return made


def padded(heads: list[list[int]]) -> Tensor:
    width = max(map(len, heads))
    rows = [[*sorted(head), *[EMPTY] * (width - len(head))] for head in heads]
    return torch.tensor(rows, dtype=torch.int32).view(len(heads), width)


def brute_force(made: Retriever, queries: Tensor, active: Tensor) -> list[set[int]]:
    """Per head the positions of the best rows that are not active, one softmax after the other."""
    keys = made.copy.rows.keys(0)
    best = []
    for head in range(HEADS):
        score = torch.zeros(made.copy.rows.length)
        for member in range(GROUP):
            score += (keys[head] @ queries[head, member] * 0.5).softmax(0)
        inactive = [p for p in range(made.copy.rows.length) if p not in active[head].tolist()]
        inactive.sort(key=lambda position: -float(score[position]))
        best.append(set(inactive[: made.count]))
    return best


@pytest.mark.parametrize("choice", ["best", "sample"])
def test_rows_of_16_bits_are_weighed_as_those_of_32(choice: str) -> None:
    random = torch.Generator().manual_seed(4)
    # Whole numbers whose products both types hold exactly.
    rows = torch.randint(-2, 3, (2, HEADS, 60, DIM), generator=random)
    queries = torch.randint(-2, 3, (HEADS, GROUP, DIM), generator=random).float()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        settings = TypeAdapter(Retrieval).validate_python({"index": "exact", "choice": choice})
        made = make_retriever(settings, 9, replace(LAYOUT, dtype=dtype))
        keys, values = rows.to(dtype)
        add_rows(made.copy, [(keys, values)])
        list(made.copy.index_rows())
        found.append(made.search(0, queries.to(dtype), padded([[3, 50], [0]]), 0.5))
    (positions, bias), (positions_16, bias_16) = found
    assert torch.equal(positions, positions_16)
    assert torch.allclose(bias, bias_16, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 40),
    count=st.integers(1, 50),
    active=st.lists(st.sets(st.integers(0, 60)), min_size=HEADS, max_size=HEADS),
    seed=st.integers(0, 100),
)
def test_the_rows_found_are_the_most_attended_ones_that_are_not_active(
    length: int, count: int, active: list[set[int]], seed: int
) -> None:
    made = retriever(length, count, seed)
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    positions = padded([list(head) for head in active])
    found = made.find(0, queries, positions, 0.5)
    expected = brute_force(made, queries, positions)
    for head in range(HEADS):
        chosen = [p for p in found.positions[head].tolist() if p >= 0]
        assert len(chosen) == len(set(chosen))
        assert set(chosen) == expected[head]
    at = found.positions >= 0
    heads, _ = at.nonzero(as_tuple=True)
    assert torch.equal(found.keys[at], made.copy.rows.keys(0)[heads, found.positions[at]])
    assert made.counts.rows == int(at.sum())


def attend(
    step: RetrievalStep, queries: Tensor, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """Attention over active rows and those that are found."""
    return step.attend(0, queries, rows, mask, Logits(DIM**-0.5))


@pytest.mark.parametrize("masked", [False, True])
def test_sessions_of_one_pass_attend_as_each_alone(masked: bool) -> None:
    """One with many rows to find, one with fewer than it may, and one without retrieval."""
    random = torch.Generator().manual_seed(5)
    retrievers = [retriever(30, 6, 1), retriever(7, 6, 2), None]
    queries = torch.randn(3, HEADS, GROUP, DIM, generator=random)
    keys, values = torch.randn(2, 3, HEADS, 4, DIM, generator=random)
    positions = torch.tensor([0, 1, 2, 40], dtype=torch.int32).expand(3, HEADS, -1).contiguous()
    mask = torch.zeros(3, HEADS, 1, 4)
    if masked:
        mask[1, 0, 0, 3] = -torch.inf
    rows = (keys, values, positions)
    together = attend(RetrievalStep(retrievers, CPU), queries, rows, mask if masked else None)
    for index, each in enumerate(retrievers):
        at = slice(index, index + 1)
        own = (keys[at], values[at], positions[at])
        if each is None:
            alone = torch.nn.functional.scaled_dot_product_attention(
                queries[at], keys[at], values[at], attn_mask=mask[at]
            )
        else:
            step = RetrievalStep([each], CPU)
            alone = attend(step, queries[at], own, mask[at] if masked else None)
        torch.testing.assert_close(together[at], alone)


def test_all_rows_together_attend_as_the_whole_cache() -> None:
    """Where every row that is not active is found, attention is that over all rows."""
    made = retriever(20, 20)
    keys, values = made.copy.rows.gather(0, torch.arange(20).expand(HEADS, -1))
    queries = torch.randn(1, HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(1))
    some = torch.tensor([0, 3, 19], dtype=torch.int32).expand(HEADS, -1)
    rows = (keys[None][:, :, [0, 3, 19]], values[None][:, :, [0, 3, 19]], some[None])
    found = attend(RetrievalStep([made], CPU), queries, rows, None)
    whole = torch.nn.functional.scaled_dot_product_attention(queries, keys[None], values[None])
    torch.testing.assert_close(found, whole)


def test_a_retriever_in_bfloat16_finds_rows_in_the_models_dtype() -> None:
    layout = PageLayout(1, HEADS, DIM, torch.bfloat16, "m")
    made = make_retriever(Retrieval(index="exact", choice="best"), 4, layout)
    keys = torch.randn(HEADS, 12, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    add_rows(made.copy, [(keys, keys)])
    none = torch.full((HEADS, 1), EMPTY, dtype=torch.int32)
    queries = keys[:, 5:6].repeat(1, GROUP, 1)
    found = made.find(0, queries, none, 1.0)
    assert found.keys.dtype == torch.bfloat16
    logits = queries[:, 0, None].float() @ keys.float().mT
    assert found.positions[:, 0].tolist() == logits[:, 0].argmax(1).tolist()


def test_a_tree_that_scans_everything_finds_what_scoring_every_row_finds() -> None:
    tree = make_retriever(Retrieval(index="tree", choice="best", scan=1.0), 40)
    exact = retriever(3000, 40)
    add_rows(tree.copy, [exact.copy.rows.gather(0, torch.arange(3000).expand(HEADS, -1))])
    list(tree.copy.index_rows())
    assert tree.copy.nbytes > exact.copy.nbytes
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(2))
    active = torch.arange(2990, 3005, dtype=torch.int32).expand(HEADS, -1)
    found, expected = (each.find(0, queries, active, 0.5) for each in (tree, exact))
    assert torch.equal(found.positions.sort(1).values, expected.positions.sort(1).values)
    for each in (tree, exact):
        each.copy.truncate(100)
    list(tree.copy.index_rows())
    found, expected = (each.find(0, queries, active, 0.5) for each in (tree, exact))
    assert torch.equal(found.positions.sort(1).values, expected.positions.sort(1).values)
    assert int(found.positions.max()) < 100


def test_a_tree_is_searched_in_a_part_of_the_rows_and_never_finds_an_active_one() -> None:
    made = make_retriever(Retrieval(index="tree", choice="best", scan=0.1), 64)
    exact = retriever(30_000, 64)
    add_rows(made.copy, [exact.copy.rows.gather(0, torch.arange(30_000).expand(HEADS, -1))])
    list(made.copy.index_rows())
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(2))
    best, _ = exact.search(0, queries, torch.full((HEADS, 1), EMPTY, dtype=torch.int32), 1.0)
    active = best[:, :8].int().sort(1).values
    found, _ = made.search(0, queries, active, 1.0)
    for head in range(HEADS):
        rows = found[head].tolist()
        assert len(set(rows)) == 64
        assert not set(rows) & set(active[head].tolist())
        assert len(set(rows) & set(best[head].tolist())) > 20


@pytest.mark.parametrize(
    ("index", "rows", "made"),
    [
        ("auto", MOST_EXACT, type(None)),
        ("auto", MOST_EXACT + 1, KeySummaries),
        ("summaries", 8, KeySummaries),
        ("exact", 10**6, type(None)),
        ("tree", 1, DciTree),
    ],
)
def test_long_sessions_are_summarised_and_those_that_ask_for_it(
    index: str, rows: int, made: type
) -> None:
    settings = TypeAdapter(Retrieval).validate_python({"index": index})
    assert isinstance(create_index(settings, rows), made)
    assert (index_bytes(settings, LAYOUT, rows) > 0) == (made is not type(None))


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_few_rows_are_found_with_and_without_a_node_of_them(length: int) -> None:
    exact = retriever(length, 4)
    made = make_retriever(Retrieval(index="summaries", choice="best"), 4)
    add_rows(made.copy, [exact.copy.rows.gather(0, torch.arange(length).expand(HEADS, -1))])
    list(made.copy.index_rows())
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(2))
    active = torch.tensor([[0, EMPTY], [EMPTY, EMPTY]], dtype=torch.int32)
    found, expected = (each.search(0, queries, active, 0.5) for each in (made, exact))
    for head in range(HEADS):
        assert set(found[0][head].tolist()) - {-1} == set(expected[0][head].tolist()) - {-1}


def test_a_descent_that_chooses_every_node_finds_what_scoring_every_row_finds() -> None:
    exact = retriever(3003, 40)
    made = make_retriever(Retrieval(index="summaries", choice="best", nodes=376), 40)
    add_rows(made.copy, [exact.copy.rows.gather(0, torch.arange(3003).expand(HEADS, -1))])
    list(made.copy.index_rows())
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(2))
    active = torch.arange(2990, 3005, dtype=torch.int32).expand(HEADS, -1)
    for _ in range(2):
        found, expected = (each.find(0, queries, active, 0.5) for each in (made, exact))
        assert torch.equal(found.positions.sort(1).values, expected.positions.sort(1).values)
        for each in (made, exact):
            each.copy.truncate(1501)
        list(made.copy.index_rows())


def test_summaries_of_more_rows_read_the_new_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_retriever(Retrieval(index="summaries"), 4)
    rows = torch.randn(2, HEADS, 300, DIM, generator=torch.Generator().manual_seed(2))
    add_rows(made.copy, [(rows[0], rows[1])])
    list(made.copy.index_rows())
    made.copy.truncate(256)
    read = list[int]()
    keys = PagedRows.keys

    def spy(paged: PagedRows, layer: int, some: slice = slice(None)) -> Tensor:
        found = keys(paged, layer, some)
        read.append(found.shape[1])
        return found

    monkeypatch.setattr(PagedRows, "keys", spy)
    add_rows(made.copy, [(rows[0, :, 256:], rows[1, :, 256:])])
    made.copy.rows.length = 300  # `add_rows` counts those that it adds
    list(made.copy.index_rows())
    assert read == [44]
    summaries = made.copy.summaries(0)
    assert summaries is not None
    fresh = KeySummaries()
    fresh.extend(rows[0])
    assert torch.equal(summaries.nodes(1), fresh.nodes(1))


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    active=st.sets(st.integers(0, 203)),
    count=st.integers(1, 60),
    index=st.sampled_from(["exact", "summaries"]),
)
def test_drawn_rows_are_distinct_and_never_active(
    seed: int, active: set[int], count: int, index: Literal["exact", "summaries"]
) -> None:
    made = retriever(203, count, seed)
    drawing = make_retriever(Retrieval(index=index, nodes=16), count)
    add_rows(drawing.copy, [made.copy.rows.gather(0, torch.arange(203).expand(HEADS, -1))])
    list(drawing.copy.index_rows())
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    found = drawing.find(0, queries, padded([sorted(active)] * HEADS), 0.5)
    assert found.positions.shape[1] <= count
    for head in found.positions.tolist():
        rows = [p for p in head if p >= 0]
        assert len(rows) == len(set(rows))
        assert not set(rows) & active
    assert torch.equal(found.positions < 0, found.bias.isneginf())
    assert bool(found.bias[found.positions >= 0].isfinite().all())


@pytest.mark.parametrize("index", ["exact", "summaries"])
def test_a_batchs_padding_changes_no_draw(index: Literal["exact", "summaries"]) -> None:
    made = retriever(203, 20)
    rows = made.copy.rows.gather(0, torch.arange(203).expand(HEADS, -1))
    drawing = make_retriever(Retrieval(index=index, nodes=16), 20)
    add_rows(drawing.copy, [rows])
    list(drawing.copy.index_rows())
    queries = torch.randn(HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(1))
    alone = padded([[0, 1, 201, 202]] * HEADS)
    in_batch = torch.nn.functional.pad(alone, (0, 5), value=EMPTY)
    found, bias = drawing.search(0, queries, alone, 0.5)
    found_in_batch, bias_in_batch = drawing.search(0, queries, in_batch, 0.5)
    assert torch.equal(found, found_in_batch)
    assert torch.equal(bias, bias_in_batch)


def test_attention_with_drawn_rows_is_nearer_to_the_whole_than_with_as_many_best_ones() -> None:
    """Where attention is spread over many rows whose values are like their keys."""
    random = torch.Generator().manual_seed(4)
    exact = retriever(2000, 48)
    keys, _ = exact.copy.rows.gather(0, torch.arange(2000).expand(HEADS, -1))
    values = keys
    rows = (keys[None][:, :, :4], values[None][:, :, :4])
    active = torch.arange(4, dtype=torch.int32).expand(1, HEADS, -1).contiguous()
    arms = {
        "best": Retrieval(choice="best"),
        "sample": Retrieval(),
        "descent": Retrieval(index="summaries", nodes=100),
    }
    errors: dict[str, list[float]] = {name: [] for name in arms}
    for name, found in errors.items():
        made = make_retriever(arms[name], 48)
        add_rows(made.copy, [(keys, values)])
        list(made.copy.index_rows())
        step = RetrievalStep([made], CPU)
        for _ in range(40):
            queries = torch.randn(1, HEADS, GROUP, DIM, generator=random)
            whole = torch.nn.functional.scaled_dot_product_attention(
                queries, keys[None], values[None]
            )
            found.append(float((attend(step, queries, (*rows, active), None) - whole).norm()))
    assert sum(errors["sample"]) < 0.7 * sum(errors["best"])
    assert sum(errors["descent"]) < 0.85 * sum(errors["best"])


def test_draws_by_coarse_codes_are_right_on_average() -> None:
    """A channel of large numbers that no query asks for leaves the codes a few bits of the others."""
    random = torch.Generator().manual_seed(6)
    keys, values = torch.randn(2, HEADS, 600, DIM, generator=random)
    keys[:, :, 0] = 60.0
    queries = torch.randn(1, HEADS, GROUP, DIM, generator=random)
    queries[..., 0] = 0
    made = make_retriever(Retrieval(index="exact"), 48)
    add_rows(made.copy, [(keys, values)])
    list(made.copy.index_rows())
    whole = torch.nn.functional.scaled_dot_product_attention(queries, keys[None], values[None])
    codes = made.copy.scored_codes(0)
    assert codes is not None
    coarse = (codes[0].float() * codes[1][..., None])[None]
    by_codes = torch.nn.functional.scaled_dot_product_attention(queries, coarse, values[None])
    outputs = []
    for newest in range(600, 1000):  # of a rotation each
        active = torch.tensor([0, newest], dtype=torch.int32).expand(1, HEADS, -1).contiguous()
        rows = keys[None][:, :, [0, 1]], values[None][:, :, [0, 1]]
        mask = torch.tensor([0.0, -torch.inf]).expand(1, HEADS, 1, -1)
        outputs.append(attend(RetrievalStep([made], CPU), queries, (*rows, active), mask))
    mean = torch.stack(outputs).mean(0)
    assert float((mean - whole).norm()) < 0.5 * float((by_codes - whole).norm())
