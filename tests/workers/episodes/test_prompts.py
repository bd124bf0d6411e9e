"""A build of an episode and the evictions in it see the same prompt."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

SETTINGS = {"rank": "attention", "whole_tokens": False, "topic": 0}


@pytest.mark.parametrize(
    ("length", "pieces"), [(30, 1), (300, 6), (500, 8)], ids=["short", "long", "over the limit"]
)
def test_a_build_and_an_eviction_observe_the_same_tokens(
    length: int,
    pieces: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make_worker(block_tokens=64, recent=8, prompt_tokens=64, episode_tokens=400)
    worker.open(
        method="epicache",
        method_settings=json.dumps(SETTINGS),
        layer_budgets="uniform",
        budget=60,
    )
    said = list(worker.turn("s", words(400), max_tokens=4).token_ids)
    engine = worker.engine
    forward = engine._forward_transient
    observed: list[list[int]] = []

    def record(resident: Any, token_ids: Sequence[int]) -> Any:
        observed.append(list(token_ids))
        return forward(resident, token_ids)

    monkeypatch.setattr(engine, "_forward_transient", record)
    plan = pb.EpisodePlan(
        id="e", patched_prompt=said[20 : 20 + length], segments=[pb.Span(start=0, stop=90)]
    )
    (episode,) = worker.build("s", plan)
    built = list(observed)
    observed.clear()
    worker.turn("s", words(3, seed=1), max_tokens=4, episode=episode)
    instruction = engine.tokenizer.encode(engine.session("s").config.method.observation.prompt)
    prompt = [token for piece in built for token in piece[len(instruction) :]]
    assert prompt == said[20 : 20 + length][-400:]
    assert len(built) >= pieces
    assert max(map(len, built)) <= 64
    assert observed[: len(built)] == built
    worker.check()
