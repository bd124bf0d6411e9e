"""The benchmark of layer-wise index reuse, on a few blocks."""

import pytest

from benchmarks.chunk_reuse import Plan, evictions, measure
from reference import MODEL_PATH
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

PLAN = Plan(seed=3, blocks=4, block=32, budget=64)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The reference model: five layers."""
    return load_model(MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> ChatTokenizer:
    """Its tokenizer."""
    return load_tokenizer(MODEL_PATH, model.eos_token_ids)


def test_layers_that_reuse_an_index_are_not_scored(
    model: LoadedModel, tokenizer: ChatTokenizer
) -> None:
    spent = evictions(model, tokenizer, PLAN)
    # The first two blocks are within the budget.
    assert [len(each.evicting) for each in spent.values()] == [2, 2]
    assert {reuse: each.scored_layers for reuse, each in spent.items()} == {1: 2 * 5, 2: 2 * 3}
    for each in spent.values():
        assert all(
            0 < part < whole for part, whole in zip(each.selecting, each.evicting, strict=True)
        )


def test_both_ways_are_reported_with_a_ratio(model: LoadedModel, tokenizer: ChatTokenizer) -> None:
    rows = measure("five layers", model, tokenizer, PLAN)
    first = "chunkkv, reuse 1"
    assert [(row["metric"], row["n"], row.get("ratio_to")) for row in rows] == [
        ("selecting", 2, None),
        ("selecting", 2, first),
        ("selecting at the same block", 2, None),
        ("evicting", 2, None),
        ("evicting", 2, first),
        ("evicting at the same block", 2, None),
        ("layers scored", 1, None),
        ("layers scored", 1, first),
    ]
    assert rows[1]["ratio"] == pytest.approx(
        rows[1]["median"] / rows[0]["median"], rel=0.01, abs=0.001
    )
    assert [row["median"] for row in rows[-2:]] == [5, 3]
