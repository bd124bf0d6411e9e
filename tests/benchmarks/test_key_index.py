"""The benchmark of indexes over keys measures what an index found against all keys."""

from pathlib import Path

import pytest
import torch

from benchmarks.key_index.__main__ import main
from benchmarks.key_index.keys import LATER, KeySet, made_up_keys, reference_keys
from benchmarks.key_index.layers import measure_reuse
from benchmarks.key_index.measure import Found, find_top, measure
from benchmarks.key_index.subjects import EveryRow, list_subjects
from kvrecall.reporting.results import read_results


def test_the_exact_scan_finds_everything() -> None:
    keys = made_up_keys(1200, tokens=3, seed=0)
    rows = {row["metric"]: row for row in measure(keys, "exact scan", EveryRow, 0)}
    assert rows["recall@64"]["mean"] == rows["share of rows"]["mean"] == 1
    assert rows["recall@64, a query at a time"]["n"] == 3 * 2 * 2
    assert 0.5 < rows["attention held by 256 rows"]["mean"] < 1


def test_a_tree_is_measured_at_its_share() -> None:
    keys = made_up_keys(1200, tokens=3, seed=0)
    make = list_subjects()["dci tree"]
    rows = {row["metric"]: row for row in measure(keys, "dci tree", make, 0)}
    assert rows["share of rows"]["mean"] == pytest.approx(0.2, abs=0.03)
    assert 0.2 < rows["recall@64"]["mean"] < 1
    assert rows["build of a layer"]["median"] > 0
    assert 0 < rows["memory per row and head"]["median"] < 52


def test_recall_and_mass_are_of_the_rows_found() -> None:
    keys = torch.zeros(1, 1000, 4)
    keys[0, :, 0] = torch.arange(1000) / 1000
    query = torch.tensor([[[8.0, 0, 0, 0]]])
    half = torch.tensor([[*range(936, 968), -1, 0]])
    found = Found(keys, query, half)
    assert found.recall() == [0.5]
    assert found.share() == [pytest.approx(33 / 1000)]
    weights = (query @ keys.transpose(1, 2) / 2).softmax(-1)[0, 0]
    kept = [*range(4), *range(936, 1000)]
    assert found.mass() == [pytest.approx(float(weights[kept].sum()), rel=1e-4)]


def test_layers_with_the_same_rows_find_one_anothers() -> None:
    one = made_up_keys(900, tokens=4, seed=0)
    other = made_up_keys(900, tokens=4, seed=1)
    pairs = {
        "same": KeySet("same", one.keys.repeat(2, 1, 1, 1), one.queries.repeat(2, 1, 1, 1, 1)),
        "other": KeySet(
            "other", torch.cat([one.keys, other.keys]), torch.cat([one.queries, other.queries])
        ),
    }
    shares = {}
    for name, keys in pairs.items():
        overlap, _, kept, best = measure_reuse(keys, seed=0)
        assert kept["mean"] == best["mean"], "of two layers there is one pair"
        shares[name] = (overlap["mean"], kept["mean"])
    assert shares["same"] == (1, pytest.approx(1))
    assert shares["other"][0] < 0.3
    assert shares["other"][1] < 0.9


def test_the_best_of_the_candidates_are_found() -> None:
    keys = made_up_keys(900, tokens=1, seed=0)
    layer, queries = keys.keys[0], keys.queries[0, 0]
    candidates = torch.arange(0, 900, 2).expand(2, -1)
    candidates = torch.cat([candidates, torch.full((2, 3), -1)], 1)
    best = find_top(layer, queries, candidates)
    logits = queries @ layer[:, ::2].transpose(1, 2)
    assert torch.equal(best, 2 * logits.topk(64, dim=-1).indices)


def test_keys_and_queries_are_those_of_the_model() -> None:
    made = reference_keys(600, tokens=2, seed=1)
    assert made.keys.shape == (4, 2, 600, 64)
    assert made.queries.shape == (4, 2, 2, 2, 64)
    again = reference_keys(600, tokens=LATER, seed=1)
    assert torch.equal(again.keys, made.keys)
    assert torch.equal(again.queries[:, [0, -1]], made.queries)
    attended = torch.einsum("lthgd,lhnd->lthgn", made.queries, made.keys) / 8
    # The first rows of a session are sinks: a sign that queries and keys belong together.
    assert float(attended.softmax(-1)[..., :4].sum(-1).mean()) > 2 * 4 / 600


def test_the_script_writes_a_result_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "key-index.json"
    given = ["made-up", "--rows", "700", "--tokens", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks/key_index/__main__.py", *given])
    main()
    written = read_results(out)
    assert written.suite == "key-index"
    assert {row["method"] for row in written.results} == set(list_subjects())


def test_smollm2_needs_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/key_index/__main__.py", "smollm2"])
    with pytest.raises(SystemExit):
        main()
