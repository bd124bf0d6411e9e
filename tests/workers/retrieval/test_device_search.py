"""Turns of real workers whose kernels search, in Triton's interpreter, beside those that the host searches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.kernels.attention import KernelAttention

# Steps of the interpreter take a good part of a second.
LIMITS: dict[str, Any] = {"block_tokens": 64, "max_budget": 256, "native_attention": False}
TOKENS = 12
ROOM = 1 << 30


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sessions of each layer that kernels have computed."""
    computed = list[int]()
    attend = KernelAttention.attend

    def watch(self: KernelAttention, queries: torch.Tensor, *rest: Any, **named: Any) -> Any:
        computed.append(len(queries))
        return attend(self, queries, *rest, **named)

    monkeypatch.setattr(KernelAttention, "attend", watch)
    return computed


def tell(done: pb.TurnDone) -> tuple[list[int], int, int]:
    """An answer, and what it retrieved."""
    return list(done.token_ids), done.retrieval.rows, done.retrieval.steps


def test_a_session_answers_as_if_the_host_searched(
    make_worker: Callable[..., Any], words: Callable[..., str], layers: list[int]
) -> None:
    """Two turns, so that there are more pages in the second one, and after it the worker's metric."""
    said, counted = [], []
    for room in (0, ROOM):
        worker = make_worker("llama", device_codes_bytes=room, **LIMITS)
        worker.open("s", budget=64, method="icecache")
        for seed in range(2):
            done = worker.turn("s", words(150, seed=seed), max_tokens=TOKENS, min_tokens=TOKENS)
            said.append(tell(done))
        counted.append(worker.metric("kvrecall_worker_retrieved_rows_total"))
        worker.check()
    assert said[:2] == said[2:]
    assert counted[0] == counted[1] == sum(rows for _, rows, _ in said[:2])
    steps = sum(steps for _, _, steps in said[:2])
    assert steps > TOKENS
    assert layers == [1] * (steps * worker.engine.model.shape.n_layers)


def test_sessions_of_a_batch_are_searched_together(
    make_worker: Callable[..., Any], words: Callable[..., str], layers: list[int]
) -> None:
    """One that keeps all of its rows active retrieves nothing."""
    said = []
    for room in (0, ROOM):
        worker = make_worker("llama", device_codes_bytes=room, **LIMITS)
        asked = []
        for index, method in enumerate(("icecache", "icecache", "full")):
            worker.open(method + str(index), budget=64, method=method)
            text = words(150 - 20 * index if method != "full" else 40, seed=index)
            asked.append((method + str(index), text))
        turns = [
            worker.submit(name, text, max_tokens=TOKENS, min_tokens=TOKENS) for name, text in asked
        ]
        said.append([tell(turn.result(300)) for turn in turns])
    assert said[0] == said[1]
    assert max(layers) > 1


def test_what_does_not_fit_is_searched_on_the_host(
    make_worker: Callable[..., Any], words: Callable[..., str], layers: list[int]
) -> None:
    worker = make_worker("llama", device_codes_bytes=1, **LIMITS)
    worker.open("s", budget=64, method="icecache")
    done = worker.turn("s", words(150), max_tokens=TOKENS, min_tokens=TOKENS)
    assert done.retrieval.rows > 0
    assert not layers
