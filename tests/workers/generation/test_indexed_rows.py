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
    layout = make_worker().engine.store.layout
    worker = make_worker(
        block_tokens=64, max_budget=2048, retrieval_bytes=RowArena.bytes_for(layout, 1500)
    )
    for name in ("s", "t"):
        worker.open(name, budget=2048)
        worker.turn(name, words(400), generate=False)
    engine = worker.engine
    sessions = [engine.session(name) for name in ("s", "t")]
    assert all(750 < session.length < 1500 for session in sessions)
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
