"""The stored answers match the present requests, and rows are read off scores correctly."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.peers.dump_kvpress import near_threshold, per_chunk, ranges
from benchmarks.peers.make_fixtures import INPUTS, build_cases, token_ids
from workers import methods

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "kvpress.json").read_text())


def test_the_fixture_answers_the_present_requests() -> None:
    assert FIXTURE["inputs"] == [token_ids(seed, tokens) for seed, tokens, _ in INPUTS]
    requested = [
        case for index, (_, *sizes) in enumerate(INPUTS) for case in build_cases(index, *sizes)
    ]
    assert [{key: case[key] for key in requested[0]} for case in FIXTURE["cases"]] == requested
    assert set(FIXTURE["versions"]) == {"kvpress", "transformers", "torch"}


def test_every_method_that_kvpress_has_is_compared() -> None:
    without = {"full", "random", "oldest", "infinipot", "scissorhands"}
    without |= {"epicache", "loopserve", "icecache"}
    assert {case["method"] for case in FIXTURE["cases"]} == set(methods.METHODS) - without


@pytest.mark.parametrize(
    ("kept", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([1, 2, 4, 5, 7], "1-2,4-5,7")],
)
def test_rows_are_written_as_ranges(kept: list[int], text: str) -> None:
    mask = torch.zeros(9, dtype=torch.bool)
    mask[kept] = True
    assert ranges(mask) == text


def test_only_scores_near_the_threshold_on_both_sides_count() -> None:
    scores = torch.tensor([[3.0, 1, 1 + 1e-6, 1, 0], [5, 4, 3, 2, 1]])
    kept = torch.tensor([[True, True, True, False, False], [True, True, False, False, False]])
    assert near_threshold(scores, kept, pooled=False).tolist() == [
        [False, True, True, True, False],
        [False] * 5,
    ]
    assert not near_threshold(scores, kept, pooled=True).any(), (
        "over both heads 1 is kept and 3 is not"
    )


def test_a_chunks_rows_share_the_mean_over_all_heads() -> None:
    scores = torch.tensor([[1.0, 3, 5, 7, 2], [0, 2, 0, 0, 1]])
    press = {"name": "ChunkKVPress", "arguments": {"chunk_length": 2}}
    assert per_chunk(scores, press).tolist() == [[3, 3, 6, 6, 3]] * 2
    assert torch.equal(per_chunk(scores, {"name": "KnormPress", "arguments": {}}), scores)
