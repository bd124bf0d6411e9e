"""The DCI-tree puts similar keys into a node and takes the nodes that the queries rank highest."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import IndexSettingsError
from kvstore.format.page import PageLayout
from kvstore.index.dci.levels import assign, build_levels, lift, promote
from kvstore.index.dci.settings import PAPER, DciSettings
from kvstore.index.dci.tree import DciTree, descend, interleave
from tests.kvstore.index.key_sets import KeySet

SMALL = DciSettings(scan_floor=0)


def random_keys(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(seed))


def recall(settings: DciSettings, real: KeySet, group: slice = slice(None)) -> float:
    shares = []
    for keys, asked in zip(real.keys, real.queries[:, :, :, group], strict=True):
        index = DciTree(settings)
        index.extend(keys)
        for queries in asked:
            best = (queries @ keys.transpose(1, 2)).topk(64, dim=-1).indices
            marks = torch.zeros(keys.shape[0], keys.shape[1] + 1, dtype=torch.bool)
            marks.scatter_(1, index.candidates(queries) % (keys.shape[1] + 1), True)
            shares.append(torch.stack([marks[h][best[h]] for h in range(len(best))]).float().mean())
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (255, []),
        (256, [256]),
        (1023, [512, 256]),
        (1024, [1024]),
        (9500, [4096, 4096, 1024, 256]),
        (65_536, [4096] * 16),
    ],
)
def test_segments_have_fixed_places(rows: int, sizes: list[int]) -> None:
    assert list(DciSettings().segments(rows)) == sizes


def test_the_paper_has_one_tree_of_several_levels() -> None:
    assert list(PAPER.segments(65_536)) == [65_536]
    assert PAPER.nodes(65_536) == (655, 131, 26, 5)


def test_nodes_count_sum_and_spread_their_keys() -> None:
    keys = random_keys(256)
    (nodes,) = build_levels(keys, SMALL)
    assert nodes.rows.sum(1).tolist() == [256, 256]
    for head in range(2):
        for node in range(nodes.rows.shape[1]):
            start, size = int(nodes.starts[head, node]), int(nodes.sizes[head, node])
            own = keys[head, nodes.members[head, start : start + size].long()]
            torch.testing.assert_close(nodes.centre[head, node], own.sum(0) / max(1, size))
            if size:
                torch.testing.assert_close(nodes.variance[head, node], own.var(0, correction=0))


def test_an_upper_node_has_the_mean_and_the_spread_of_the_rows_below() -> None:
    keys = random_keys(256)
    bottom, upper = build_levels(keys, replace(SMALL, promotion=(1 / 16, 1 / 16)))
    assert upper.rows.tolist() == [[256], [256]]
    torch.testing.assert_close(upper.centre[:, 0], keys.mean(1))
    torch.testing.assert_close(upper.variance[:, 0], keys.var(1, correction=0))
    assert bottom.rows.shape == (2, 16)


def test_without_refinement_a_row_is_below_the_nearest_promoted_one() -> None:
    keys = random_keys(256)
    nodes = build_levels(keys, PAPER)[0]
    promoted = promote(256, 3, keys.device)
    assert torch.equal(nodes.centre, keys[:, promoted])
    lifted = lift(keys)
    nearest = torch.cdist(lifted, lifted[:, promoted]).argmin(-1)
    for head in range(2):
        expected = torch.stack([(nearest[head] == node).sum() for node in range(3)])
        assert nodes.rows[head].tolist() == expected.tolist()


def test_lifted_keys_rank_by_distance_as_by_inner_product() -> None:
    keys = 7 * random_keys(300).double()
    lifted = lift(keys)
    torch.testing.assert_close(lifted.norm(dim=-1), torch.ones(2, 300).double())
    query = torch.nn.functional.normalize(random_keys(1, seed=1).double(), dim=-1)
    flat = torch.nn.functional.pad(query, (0, 1))
    by_distance = torch.cdist(flat, lifted)[:, 0].argsort()
    by_product = (query @ keys.transpose(1, 2))[:, 0].argsort(descending=True)
    assert torch.equal(by_distance, by_product)


def test_refinement_brings_rows_nearer_to_their_centre() -> None:
    points = lift(random_keys(1024))
    promoted = promote(1024, 64, points.device)

    def spread(rounds: int) -> float:
        labels = assign(points, promoted, rounds)
        parts = [points[head][labels[head] == node] for head in range(2) for node in range(64)]
        return sum(float((part - part.mean(0)).square().sum()) for part in parts if len(part))

    assert spread(0) > 1.1 * spread(2)


def test_the_settings_find_more_than_the_papers(real_keys: KeySet) -> None:
    ours = recall(SMALL, real_keys)
    assert ours > recall(replace(SMALL, rank="parent"), real_keys) + 0.01
    assert ours > recall(replace(SMALL, refine=0), real_keys) + 0.02
    assert ours > recall(replace(SMALL, promotion=(1 / 64,)), real_keys) + 0.05


def test_upper_levels_lose_little(real_keys: KeySet, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = recall(SMALL, real_keys)
    monkeypatch.setattr("kvstore.index.dci.tree._FLAT", 16)
    descended = recall(replace(SMALL, promotion=(1 / 16, 1 / 5)), real_keys)
    assert flat - 0.1 < descended <= flat


def test_a_head_with_fewer_nodes_to_choose_from_has_no_others() -> None:
    (nodes,) = build_levels(random_keys(256), SMALL)
    among = torch.tensor([[0, 1, 2], [4, -1, -1]])
    found = descend(nodes, random_keys(1, seed=1), among, 256).tolist()
    for head, chosen in enumerate(([0, 1, 2], [4])):
        expected = []
        for node in chosen:
            start, size = int(nodes.starts[head, node]), int(nodes.sizes[head, node])
            expected += nodes.members[head, start : start + size].tolist()
        assert sorted(row for row in found[head] if row >= 0) == sorted(expected)


def test_as_many_rows_are_returned_as_the_settings_say(real_keys: KeySet) -> None:
    keys, queries = real_keys.keys[0], real_keys.queries[0, 0]
    for settings, rows in ((SMALL, 800), (replace(SMALL, scan=0.05), 200), (DciSettings(), 2048)):
        index = DciTree(settings)
        index.extend(keys)
        counts = (index.candidates(queries) >= 0).sum(1)
        # A node has 16 rows or so, and the last one may be larger than what is left of the budget.
        assert ((counts > 0.9 * rows) & (counts < rows + 16)).all()


def test_no_query_of_a_group_takes_all_rows() -> None:
    # Two clusters; the first query's logits are a thousand times as large.
    keys = random_keys(1024)
    keys[:, ::2, 0] += 20
    keys[:, 1::2, 1] += 20
    queries = torch.zeros(2, 2, 8)
    queries[:, 0, 0] = 1000
    queries[:, 1, 1] = 1
    index = DciTree(replace(SMALL, scan=0.25))
    index.extend(keys)
    candidates = index.candidates(queries)
    even = ((candidates % 2 == 0) & (candidates >= 0)).sum(1) / (candidates >= 0).sum(1)
    assert ((even > 0.35) & (even < 0.65)).all()


def test_nodes_are_taken_in_turns() -> None:
    scores = torch.tensor([[[9.0, 8.0, 7.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0, 2.0]]])
    rows = torch.full((1, 5), 10)
    assert interleave(scores, rows, 20).tolist() == [[True, False, False, True, False]]
    assert interleave(scores, rows, 35).tolist() == [[True, True, False, True, False]]
    assert interleave(scores, rows, 0).tolist() == [[True, False, False, True, False]]


def test_the_rows_behind_the_last_segment_are_always_candidates() -> None:
    index = DciTree(SMALL)
    keys = random_keys(1151)
    for end in (1025, 1100, 1151):
        index.extend(keys[:, :end])
        for head in index.candidates(random_keys(1, seed=1)).tolist():
            assert set(head) >= set(range(1024, end))


@pytest.mark.parametrize("settings", [SMALL, PAPER])
def test_equal_keys_and_zeros_are_indexed(settings: DciSettings) -> None:
    index = DciTree(settings)
    index.extend(torch.zeros(2, 700, 8))
    index.check()
    assert index.nbytes > 4 * 2 * 512  # a member of 4 bytes for each row of a segment
    assert (index.candidates(torch.ones(2, 1, 8)) >= 0).sum(1).min() >= 188


@hypothesis.settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    settings=st.sampled_from([SMALL, PAPER]),
)
def test_a_tree_takes_no_more_memory_than_was_foretold(
    lengths: list[int], dtype: torch.dtype, settings: DciSettings
) -> None:
    layout = PageLayout(n_layers=1, n_kv_heads=2, head_dim=8, dtype=dtype, fingerprint="none")
    keys = random_keys(3000).to(dtype)
    index = DciTree(settings)
    for length in sorted(lengths):
        index.extend(keys[:, :length])
        assert index.nbytes <= DciTree.bytes_for(layout, settings, length)
    assert DciTree.bytes_for(layout, settings, 3000) < 0.5 * keys.nbytes


def test_a_broken_tree_is_noticed() -> None:
    index = DciTree(SMALL)
    index.extend(random_keys(600))
    members = index._levels[0].nodes.members
    members[1, 3] = members[1, 4]
    with pytest.raises(AssertionError, match="every member once"):
        index.check()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scan": 0.0}, "scan is 0"),
        ({"scan": 1.1}, "scan is 1.1"),
        ({"scan_floor": -1}, "scan_floor"),
        ({"refine": -1}, "refine"),
        ({"promotion": ()}, "promotion"),
        ({"promotion": (0.5, 1.0)}, "promotion"),
        ({"segment": 3000}, "segment is 3000"),
    ],
)
def test_settings_out_of_range_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(IndexSettingsError, match=message):
        replace(DciSettings(), **changed)
