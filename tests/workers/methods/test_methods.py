"""What every eviction method promises, and what each of them ranks first."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import methods, scoring
from workers.cache import EMPTY
from workers.errors import BadSettings, UnknownMethod
from workers.methods import LayerRows

KV_HEADS, HEADS, ROWS, HEAD_DIM, TOKENS = 2, 4, 24, 8, 5


@pytest.fixture
def rows() -> LayerRows:
    """24 rows in one head, 20 in the other, the last 5 tokens observed."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(0, 2 * ROWS, 2, dtype=torch.int32).repeat(KV_HEADS, 1)
    positions[1, 20:] = EMPTY
    return LayerRows(
        layer=1,
        keys=torch.randn(KV_HEADS, ROWS, HEAD_DIM, generator=generator),
        values=torch.randn(KV_HEADS, ROWS, HEAD_DIM, generator=generator),
        positions=positions,
        queries=torch.randn(HEADS, TOKENS, HEAD_DIM, generator=generator),
        query_positions=torch.arange(2 * ROWS - TOKENS, 2 * ROWS, dtype=torch.int32),
        accumulated=torch.zeros(KV_HEADS, ROWS),
        end=2 * ROWS,
        seed=9,
    )


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_method_scores_all_rows_and_selects_within_its_budget(name: str, rows: LayerRows) -> None:
    method = methods.build(name)
    scores = method.scores(rows)
    assert scores.shape == rows.positions.shape
    assert scores.dtype == torch.float32
    assert torch.equal(scores, method.scores(rows)), "the same rows, the same scores"
    places = method.select(scores, rows, 7)
    for head, kept in enumerate(places.tolist()):
        chosen = [place for place in kept if place >= 0]
        assert kept == chosen + [-1] * (len(kept) - len(chosen))
        assert chosen == sorted(set(chosen))
        assert bool((rows.positions[head, chosen] != EMPTY).all())
        assert len(chosen) == (min(7, int((rows.positions[head] != EMPTY).sum())) if method.evicts else 24 - 4 * head)


@pytest.mark.parametrize("name", [name for name, method in methods.METHODS.items() if method.evicts])
def test_what_is_protected_is_selected_by_every_method(name: str, rows: LayerRows) -> None:
    method = methods.build(name)
    scores = method.scores(rows)
    scores[:, [3, 11, 12]] = torch.inf
    for kept in method.select(scores, rows, 7).tolist():
        assert {3, 11, 12} <= set(kept)


def test_streaming_keeps_sinks_and_the_newest(rows: LayerRows) -> None:
    method = methods.build("streaming_llm", '{"sinks": 3}')
    places = method.select(method.scores(rows), rows, 8)
    assert places.tolist() == [[0, 1, *range(18, 24)], [0, 1, *range(14, 20)]], "positions 0 and 2 are the sinks"


def test_snapkv_ranks_by_pooled_mean_attention_of_the_window(rows: LayerRows) -> None:
    weights = scoring.attention(rows.queries, rows.keys, rows.positions, rows.query_positions)
    for group in ("mean", "max"):
        method = methods.build("snapkv", json.dumps({"window": TOKENS, "pool": 3, "group": group}))
        assert method.observation.window == TOKENS
        of_tokens = weights.mean(2)
        reduced = of_tokens.mean(1) if group == "mean" else of_tokens.amax(1)
        expected = torch.stack([reduced[:, max(0, row - 1) : row + 2].amax(1) for row in range(ROWS)], dim=1)
        assert torch.allclose(method.scores(rows), expected)


def test_snapkv_without_an_observed_token_prefers_nobody(rows: LayerRows) -> None:
    blind = replace(rows, queries=rows.queries[:, :0], query_positions=rows.query_positions[:0])
    assert not methods.build("snapkv").scores(blind).any()


def test_random_draws_anew_for_every_layer_and_eviction(rows: LayerRows) -> None:
    def drawn(**changes: Any) -> Tensor:
        return methods.build("random").scores(replace(rows, **changes))

    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(seed=10))
    assert not torch.equal(drawn(), drawn(layer=2))
    assert drawn(seed=2**64 - 1).shape == rows.positions.shape


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("snapkv", '{"window": 0}', "window"),
        ("snapkv", '{"pool": 64}', "pool"),
        ("snapkv", '{"group": "median"}', "group"),
        ("streaming_llm", '{"sinks": -1}', "sinks"),
        ("streaming_llm", '{"sink": 4}', "sink"),
        ("random", "[]", "settings"),
        ("full", "{", "settings"),
    ],
)
def test_bad_settings_are_named(name: str, settings: str, told: str) -> None:
    with pytest.raises(BadSettings, match=told):
        methods.build(name, settings)


def test_an_unknown_method_is_told_which_there_are() -> None:
    with pytest.raises(UnknownMethod, match="full, streaming_llm, snapkv, random"):
        methods.build("h2o")


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_method_describes_itself_and_its_settings(name: str) -> None:
    described = methods.describe(name)
    assert described.name == name
    assert described.summary.endswith(".")
    schema = json.loads(described.settings_schema)
    assert schema["type"] == "object"
    assert methods.build(name, "") == methods.build(name)
