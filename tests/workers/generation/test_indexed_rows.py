"""Filling of a session's rows in host memory: what it takes is known before others run."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.index.arena import RowArena
from workers.generation.indexed_rows import fill_rows


def test_memory_is_taken_before_the_rows_are_copied(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """So sessions that are filled at the same time do not take the same room."""
    limits = {"block_tokens": 64, "max_budget": 2048}
    worker = make_worker(**limits)
    worker.open("s", budget=2048)
    length = worker.turn("s", words(400), generate=False).memory.length
    layout = worker.engine.store.layout
    # Of the first one there is room for what it copies at first, but not for all.
    beside = 1500 * layout.token_bytes
    worker = make_worker(retrieval_bytes=RowArena.bytes_for(layout, length) + beside, **limits)
    for name in ("s", "t"):
        worker.open(name, budget=2048)
        worker.turn(name, words(400), generate=False)
    engine = worker.engine
    sessions = [engine.session(name) for name in ("s", "t")]
    for session in sessions:
        session.dirty = True  # as in a turn: what it holds stays
    first, second = (fill_rows(engine, engine.swap_in(session)) for session in sessions)
    step = next(first)
    while isinstance(step, Future):
        step.result()
        step = next(first)
    rows = sessions[0].indexed_rows
    assert rows.arena.length < sessions[0].length, "it is not filled yet"
    with pytest.raises(StopIteration) as ended:
        next(second)
    assert ended.value.value is None, "the other session took the same memory"
