"""Whole answers of the reference model, computed natively and by torch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from workers.native.attention import NativeAttention
from workers.retrieval.retriever import Retriever

LIMITS: dict[str, Any] = {"block_tokens": 128, "max_budget": 512}
TOKENS = 60


class Draws:
    """Rows that were drawn in every step, layer and head of an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[set[int]]] = []
        search, attend = Retriever.search, NativeAttention.attend

        def watch_search(*arguments: Any) -> tuple[Tensor, Tensor]:
            positions, bias = search(*arguments)
            self._add(positions.tolist())
            return positions, bias

        def watch_attend(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            out, drawn = attend(*arguments, **named)
            self._add(drawn[0, :, 1:].tolist())
            return out, drawn

        monkeypatch.setattr(Retriever, "search", watch_search)
        monkeypatch.setattr(NativeAttention, "attend", watch_attend)

    def _add(self, heads: Sequence[Sequence[int]]) -> None:
        self.found.append([{position for position in head if position >= 0} for head in heads])

    def take(self) -> list[list[set[int]]]:
        """What was drawn since the last call."""
        found, self.found = self.found, []
        return found


def test_an_answer_draws_the_same_rows_whatever_computes_it(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    native: NativeAttention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = Draws(monkeypatch)
    answers, drawn = [], []
    for computed_by in (None, native):
        worker = make_worker("reference", **LIMITS)
        worker.engine.native = computed_by
        worker.open("s", budget=128, method="icecache")
        done = worker.turn("s", words(900), max_tokens=TOKENS, min_tokens=TOKENS)
        answers.append((list(done.token_ids), done.retrieval.rows, done.retrieval.steps))
        drawn.append(draws.take())
    assert answers[0] == answers[1]
    assert answers[0][2] > TOKENS // 2
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == answers[0][2] * worker.engine.model.shape.n_layers


def test_a_worker_may_be_told_to_compute_with_torch(make_worker: Callable[..., Any]) -> None:
    assert make_worker(native_attention=False).engine.native is None
