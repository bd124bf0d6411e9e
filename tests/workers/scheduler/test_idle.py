"""Idle sessions leave memory after a time or above a bound, and come back as they were committed."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.session import WorkerSession
from workers.errors import NotComparable, UnknownSession
from workers.scheduler.idle import IdleSessions

SPEC: dict[str, Any] = {"method": "snapkv", "budget": 60}


def await_release(worker: Any, *names: str) -> None:
    """Wait until the worker has released these sessions, and its writer has done so too."""
    end = time.monotonic() + 60
    while set(names) & worker.engine.sessions.keys():
        assert time.monotonic() < end, "the sessions were not released"
        time.sleep(0.01)
    # The scheduler's thread is behind the release, and the writer's has what that has asked for.
    worker.scheduler._loop.call(lambda: None).result(60)
    worker.engine.store_io.submit(lambda: None).result(60)


@contextmanager
def held(worker: Any) -> Iterator[None]:
    """Hold the scheduler's thread, so that it gets all requests of the body at the same time."""
    end = threading.Event()
    worker.scheduler._loop.call(lambda: end.wait(600))
    try:
        yield
    finally:
        end.set()


def spec_of(name: str) -> pb.SessionSpec:
    """A new session's specification."""
    return pb.SessionSpec(session=name, epoch=1, method_settings="{}", **SPEC)


USES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.integers(0, 100)), max_size=30
)


@given(USES, st.sets(st.sampled_from("abcdef")), st.integers(0, 200))
def test_the_longest_idle_sessions_are_released_until_the_rest_fits(
    uses: list[tuple[str, int, int]], busy: set[str], max_bytes: int
) -> None:
    idle = IdleSessions(idle_seconds=10, max_bytes=max_bytes, least_seconds=4)
    now = 0.0
    expected: dict[str, tuple[float, int]] = {}
    for name, seconds, nbytes in uses:
        now += seconds
        idle.use(name, now)
        idle.measure(name, nbytes)
        expected.pop(name, None)
        expected[name] = (now, nbytes)
    assert idle.nbytes == sum(nbytes for _, nbytes in expected.values())
    total = idle.nbytes
    due = []
    for name, (at, nbytes) in expected.items():
        if at + (4 if total > max_bytes else 10) > now:
            break
        if name not in busy:
            due.append(name)
            total -= nbytes
    assert idle.take_due(busy, now) == due
    assert idle.nbytes == total
    assert all(idle.last_use(name) == 0.0 for name in due)


def test_an_idle_session_is_released_and_continues_as_if_it_had_not_been(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    limits = {"block_tokens": 24, "recent": 8}
    kept = make_worker(**limits)
    kept.open(**SPEC)
    kept.turn("s", words(70), max_tokens=8)
    expected = kept.turn("s", words(30, seed=1), max_tokens=8)
    worker = make_worker(**limits, idle_seconds=0.3)
    worker.open(**SPEC)
    state = worker.turn("s", words(70), max_tokens=8).state
    await_release(worker, "s")
    assert worker.scheduler.slots_in_use() == 0
    with pytest.raises(UnknownSession):
        worker.turn("s", words(30, seed=1))
    worker.open(**SPEC, state=state, epoch=2)
    done = worker.turn("s", words(30, seed=1), max_tokens=8, epoch=2)
    assert list(done.token_ids) == list(expected.token_ids)
    worker.check()


def test_a_session_is_not_released_while_a_job_of_it_runs_or_waits(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=8, recent=8, slots=1, idle_seconds=0.01)
    turns = []
    with held(worker):
        for name in "ab":
            worker.scheduler.open(pb.OpenRequest(spec=spec_of(name)))
            turns.append(worker.submit(name, words(60), max_tokens=30))
    # Each waits for the only slot far longer than the time after which it would be released.
    assert all(turn.result(600).output_tokens for turn in turns)


def held_by_sessions() -> int:
    """Bytes that the engine, the scheduler and the store's sessions have allocated.

    Pages, their summaries and the tiers' indices have bounds of their own.
    """
    parts = [tracemalloc.Filter(True, f"*/{part}/*") for part in ("workers", "kvstore/sessions")]
    traces = tracemalloc.take_snapshot().filter_traces(parts)
    return sum(each.size for each in traces.statistics("filename"))


def test_a_released_session_holds_less_than_four_kibibytes(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8, idle_seconds=0.5)
    count = 20

    def use(*names: str) -> None:
        for name in names:
            worker.open(name, **SPEC)
            worker.turn(name, words(60), generate=False)
        await_release(worker, *names)

    use("warm")
    gc.collect()
    tracemalloc.start()
    before = held_by_sessions()
    names = {f"released-{number}" for number in range(count)}
    use(*names)
    gc.collect()
    held = held_by_sessions() - before
    tracemalloc.stop()
    assert held / count < 4096
    assert not worker.engine.store.sessions()
    assert not worker.engine.sessions
    # Other tests' sessions may be alive in this process: only this test's count.
    alive = (each for each in gc.get_objects() if type(each) is WorkerSession)
    assert not names & {each.config.name for each in alive}


def test_a_released_session_cannot_be_compared_with(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(idle_seconds=0.5)
    said = [{"role": "assistant", "content": words(9)}]
    worker.open("a")
    worker.turn("a", said, generate=False, keep_distribution=True)
    await_release(worker, "a")
    worker.open("b")
    with pytest.raises(NotComparable, match="soon after"):
        worker.turn("b", said, generate=False, compare_with="a")
