"""A session's state has a version, and a worker refuses any other than its own."""

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
    assert state.state_version == STATE_VERSION == 4


@pytest.mark.parametrize("version", [0, STATE_VERSION - 1])
def test_an_older_state_is_refused_and_changes_nothing(committed: Any, version: int) -> None:
    worker, state = committed
    older = pb.SessionState()
    older.CopyFrom(state)
    older.state_version = version
    with pytest.raises(IncompatibleState, match=f"version {version}, this worker reads version 4"):
        worker.open(state=older, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state


def test_a_newer_state_is_refused_and_changes_nothing(committed: Any) -> None:
    worker, state = committed
    newer = pb.SessionState()
    newer.CopyFrom(state)
    newer.state_version = STATE_VERSION + 1
    with pytest.raises(IncompatibleState, match="version 5, this worker reads version 4"):
        worker.open(state=newer, **SPEC)
    assert worker.engine.snapshot(worker.engine.session("s")) == state
    with pytest.raises(IncompatibleState, match="upgrade this worker"):
        worker.open("other", state=newer, **SPEC)
    with pytest.raises(UnknownSession):
        worker.memory("other")
