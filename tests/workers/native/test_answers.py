"""Whole answers of the reference model, computed by native steps, by native attention, and by torch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from workers.model.decoding.decoder import Decoder
from workers.native.attention import NativeAttention
from workers.native.decoder import Decoded, NativeDecoder
from workers.retrieval.retriever import Retriever

LIMITS: dict[str, Any] = {"block_tokens": 128, "max_budget": 512}
TOKENS = 60

Drawn = Sequence[Sequence[set[int]]]
"""Rows of each head, by steps and layers."""


class Draws:
    """Rows that were drawn in every step, layer and head of an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[set[int]]] = []
        search, attend, decode = Retriever.search, NativeAttention.attend, NativeDecoder.decode

        def watch_search(*arguments: Any) -> tuple[Tensor, Tensor]:
            positions, bias = search(*arguments)
            self._add(positions.tolist())
            return positions, bias

        def watch_attend(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            out, drawn = attend(*arguments, **named)
            self._add(drawn[0, :, 1:].tolist())
            return out, drawn

        def watch_decode(*arguments: Any, **named: Any) -> Decoded:
            decoded = decode(*arguments, **named)
            retrieves = decoded.drawn.shape[-1] > 1
            for layer in decoded.drawn[:, 0, :, 1:] if retrieves else ():
                self._add(layer.tolist())
            return decoded

        monkeypatch.setattr(Retriever, "search", watch_search)
        monkeypatch.setattr(NativeAttention, "attend", watch_attend)
        monkeypatch.setattr(NativeDecoder, "decode", watch_decode)

    def _add(self, heads: Sequence[Sequence[int]]) -> None:
        self.found.append([{position for position in head if position >= 0} for head in heads])

    def take(self) -> list[list[set[int]]]:
        """What was drawn since the last call."""
        found, self.found = self.found, []
        return found


def count(drawn: Drawn) -> int:
    """Rows that were drawn, over all steps, layers and heads."""
    return sum(len(head) for heads in drawn for head in heads)


def count_others(drawn: Drawn, beside: Drawn) -> int:
    """Rows that were drawn here alone."""
    pairs = zip(drawn, beside, strict=True)
    return sum(
        len(one - other)
        for heads, others in pairs
        for one, other in zip(heads, others, strict=True)
    )


def test_an_answer_draws_the_same_rows_whatever_computes_it(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    native: NativeAttention,
    decoder: Callable[[str], Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = decoder("reference")
    draws = Draws(monkeypatch)
    answers, drawn = [], []
    for attention, decodes in ((None, None), (native, None), (native, steps)):
        worker = make_worker("reference", **LIMITS)
        worker.engine.native, worker.engine.decoder = attention, decodes
        worker.open("s", budget=128, method="icecache")
        done = worker.turn("s", words(900), max_tokens=TOKENS, min_tokens=TOKENS)
        answers.append((list(done.token_ids), done.retrieval.rows, done.retrieval.steps))
        drawn.append(draws.take())
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][2] > TOKENS // 2
    assert drawn[1] == drawn[2]
    # Torch sums in another order on each kind of CPU, and takes the other of two rows that are as good as equal.
    assert count_others(drawn[0], drawn[1]) < count(drawn[0]) / 1000
    assert len(drawn[0]) == answers[0][2] * worker.engine.model.shape.n_layers


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o", "adakv", "streaming_llm"])
def test_a_method_evicts_the_same_rows_whatever_computes_its_steps(
    method: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    decoder: Callable[[str], Decoder],
) -> None:
    """What it observes of an answer's steps, too: they evict in the middle of it."""
    steps = decoder("reference")
    said = []
    for decodes in (None, steps):
        worker = make_worker("reference", **LIMITS)
        worker.engine.decoder = decodes
        worker.open("s", budget=96, method=method)
        done = worker.turn("s", words(150), max_tokens=200, min_tokens=200)
        engine = worker.engine
        kept = engine.session("s").active_selection(engine.cache)
        said.append((list(done.token_ids), [each.tolist() for each in kept.positions]))
    assert said[0] == said[1]


def test_a_worker_may_be_told_to_compute_with_torch(make_worker: Callable[..., Any]) -> None:
    engine = make_worker(native_attention=False).engine
    assert engine.native is None
    assert engine.decoder is None
