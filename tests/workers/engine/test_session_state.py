"""A session's state has a version: newer ones are refused, those without one are version 1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.eviction_scores import EvictionScores
from workers.engine.session_state import STATE_VERSION
from workers.errors import IncompatibleState, UnknownSession

SPEC = {"method": "snapkv", "budget": 60}


@pytest.fixture
def committed(make_worker: Callable[..., Any], words: Callable[..., str]) -> Any:
    """A worker, and the state of its session after a turn."""
    worker = make_worker(block_tokens=24, recent=8)
    worker.open(**SPEC)
    return worker, worker.turn("s", words(70), max_tokens=4).state


def test_a_committed_state_has_the_current_version(committed: Any) -> None:
    _, state = committed
    assert state.state_version == STATE_VERSION == 2


@pytest.mark.parametrize("version", [None, 1])
def test_a_state_of_version_1_is_read_and_committed_as_version_2(
    committed: Any, version: int | None
) -> None:
    worker, state = committed
    scores = EvictionScores.from_bytes(state.eviction_scores)
    dense = torch.zeros(state.length)
    dense[scores.tokens.long()] = scores.scores
    old = pb.SessionState()
    old.CopyFrom(state)
    old.eviction_scores = dense.numpy().tobytes()
    old.ClearField("state_version")
    if version is not None:
        old.state_version = version
    worker.open(state=old, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state


def test_of_a_long_state_of_version_1_the_best_scores_are_kept(committed: Any) -> None:
    worker, state = committed
    old = pb.SessionState()
    old.CopyFrom(state)
    old.state_version = 1
    old.eviction_scores = torch.arange(state.length).float().numpy().tobytes()
    worker.open(state=old, **SPEC)
    kept = worker.engine.session("s").eviction_scores
    assert kept.tokens.tolist() == [*range(state.length - 60, state.length)]
    assert kept.scores.tolist() == kept.tokens.tolist()


def test_a_newer_state_is_refused_and_changes_nothing(committed: Any) -> None:
    worker, state = committed
    newer = pb.SessionState()
    newer.CopyFrom(state)
    newer.state_version = STATE_VERSION + 1
    with pytest.raises(IncompatibleState, match="version 3, this worker reads versions up to 2"):
        worker.open(state=newer, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state
    with pytest.raises(IncompatibleState, match="upgrade this worker"):
        worker.open("other", state=newer, **SPEC)
    with pytest.raises(UnknownSession):
        worker.memory("other")
