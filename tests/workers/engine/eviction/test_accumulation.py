"""What rows accumulate is what all queries together gave them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.engine.eviction.accumulation import received_weight, received_weights
from workers.primitives import scoring

GROUP = 2


def _whole_attention(path: Path, token_ids: list[int]) -> list[Tensor]:
    """transformers' own attention weights over everything, per layer `[n_heads, t, t]`."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [
            layer[0]
            for layer in model(torch.tensor([token_ids]), output_attentions=True).attentions
        ]


@pytest.mark.parametrize("block_tokens", [1, 17, 512])
@pytest.mark.parametrize(("method", "kind"), [("h2o", "attention"), ("scissorhands", "hits")])
def test_prefill_and_decoding_add_up_to_the_whole_attention(
    method: str,
    kind: str,
    block_tokens: int,
    make_worker: Callable[..., Any],
    model_path: Callable[[str], Path],
    words: Callable[..., str],
) -> None:
    """Against transformers' weights, computed in one pass over three turns' tokens."""
    worker = make_worker("qwen3", block_tokens=block_tokens)
    worker.open(method=method)
    said = [
        token
        for turn in range(3)
        for token in worker.turn("s", words(30, seed=turn), max_tokens=9).token_ids
    ]
    session = worker.engine.session("s")
    cache = worker.engine.cache
    computed = session.length + session.unsettled
    for layer, weights in enumerate(_whole_attention(model_path("qwen3"), said[:computed])):
        if kind == "hits":
            seen = torch.arange(1, computed + 1)[:, None]
            weights = (weights * seen > 1).float()
        expected = weights.sum(1).unflatten(0, (-1, GROUP)).mean(1)[:, : session.length]
        held = cache.read(session.slot, layer).accumulated
        wrong = (held - expected).abs() > 1e-3
        assert int(wrong.sum()) <= (0 if kind == "attention" else 2), (
            "a weight may lie on the even share itself"
        )


@pytest.mark.parametrize("kind", ["attention", "hits"])
def test_pieces_of_the_queries_add_up_to_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 9, 8, generator=generator)
    keys = torch.randn(2, 20, 8, generator=generator)
    positions = torch.arange(20, dtype=torch.int32).repeat(2, 1)
    positions[1, 15:] = EMPTY
    at = torch.arange(11, 20, dtype=torch.int32)
    whole = received_weight(queries, keys, positions, at, kind)
    monkeypatch.setattr(scoring, "_MAX_WEIGHTS", 4 * 20 * 2)
    assert torch.allclose(received_weight(queries, keys, positions, at, kind), whole, atol=1e-6)
    assert not bool(whole[1, 15:].any()), "what is not there gets nothing"
    if kind == "attention":
        assert torch.allclose(whole.sum(1), torch.full((2,), 9.0)), (
            "each query gives away all it has"
        )


def test_in_heads_of_uneven_length_every_row_gets_its_own(
    make_cache: Callable[..., ActiveCache],
) -> None:
    """The second head has twice as many rows as an even head could."""
    cache = make_cache(rows=(16, 16))
    slot = cache.claim([16, 16])
    generator = torch.Generator().manual_seed(1)
    step = ForwardStep(cache, [slot], torch.arange(16)[None])
    for layer in range(2):
        step.update(*torch.randn(2, 1, 2, 16, 4, generator=generator), layer)
        places = torch.arange(16).repeat(2, 1)
        places[0, 1:] = -1
        cache.keep(slot, layer, places)
    step = ForwardStep(cache, [slot], 16 + torch.arange(6)[None])
    for layer in range(2):
        step.update(*torch.randn(2, 1, 2, 6, 4, generator=generator), layer)
    queries = torch.randn(2, 4, 6, 4, generator=generator)
    received = received_weights(cache, slot, list(queries), step.query_positions[0], "attention")
    for layer in range(2):
        cache.accumulate(slot, layer, received[layer])
        rows = cache.read(slot, layer)
        expected = received_weight(
            queries[layer], rows.keys, rows.positions, step.query_positions[0], "attention"
        )
        assert torch.allclose(rows.accumulated, expected)
        assert torch.allclose(rows.accumulated.sum(1), torch.full((2,), 6.0))
    cache.check_integrity()
