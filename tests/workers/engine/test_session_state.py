"""A session's state has a version: newer ones are refused, those without one are version 1."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
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
    assert state.state_version == STATE_VERSION == 1


def test_a_state_without_a_version_is_read_as_version_1(committed: Any) -> None:
    worker, state = committed
    old = pb.SessionState()
    old.CopyFrom(state)
    old.ClearField("state_version")
    worker.open(state=old, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state


def test_a_newer_state_is_refused_and_changes_nothing(committed: Any) -> None:
    worker, state = committed
    newer = pb.SessionState()
    newer.CopyFrom(state)
    newer.state_version = STATE_VERSION + 1
    with pytest.raises(IncompatibleState, match="version 2, this worker reads versions up to 1"):
        worker.open(state=newer, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state
    with pytest.raises(IncompatibleState, match="upgrade this worker"):
        worker.open("other", state=newer, **SPEC)
    with pytest.raises(UnknownSession):
        worker.memory("other")
