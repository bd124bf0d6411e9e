"""Filling of a session's rows in host memory: what it takes is known before others run."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.workers.drive import drive
from workers.generation.host_copy import fill_host_copy
from workers.retrieval.indexes import index_bytes


def test_memory_is_taken_before_the_rows_are_copied(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """So sessions that are filled at the same time do not take the same room."""
    limits = {"block_tokens": 64, "max_budget": 2048}
    worker = make_worker(**limits)
    worker.open("s", budget=2048)
    length = worker.turn("s", words(400), generate=False).memory.length
    layout = worker.engine.store.layout
    pages = -(-length // layout.page_tokens)
    # Of the second one there is room for some pages, but not for all.
    room = (pages + pages // 2) * layout.page_bytes
    worker = make_worker(held_bytes=room, **limits)
    for seed, name in enumerate(("s", "t")):
        worker.open(name, budget=2048)
        worker.turn(name, words(400, seed=seed), generate=False)
    engine = worker.engine
    sessions = [engine.session(name) for name in ("s", "t")]
    for session in sessions:
        engine.host_cache.pin(session.name)  # as in a turn: what it holds stays
    first, second = (fill_host_copy(engine, engine.swap_in(session)) for session in sessions)
    step = next(first)
    while isinstance(step, Future):
        step.result()
        step = next(first)
    rows = sessions[0].host_copy
    assert rows.rows.length < sessions[0].length, "it is not filled yet"
    assert drive(second)[0] is None, "the other session took the same memory"


@pytest.mark.parametrize("index", ["summaries", "tree"])
def test_memory_is_taken_for_the_index_too(
    index: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Room for the rows alone is none: what is made of their keys would exceed the limit."""
    options = {"options": json.dumps({"retrieve": {"share": 0.3, "index": index}})}
    limits = {"block_tokens": 64, "max_budget": 2048}
    held = []
    worker = make_worker(**limits)
    worker.open("s", method="snapkv", budget=64, **options)
    length = worker.turn("s", words(400), generate=False).memory.length
    layout, settings = worker.engine.store.layout, worker.engine.session("s").config.retrieval
    rows_alone = -(-length // layout.page_tokens) * layout.page_bytes
    for limit in (rows_alone, rows_alone + index_bytes(settings, layout, length)):
        worker = make_worker(held_bytes=limit, **limits)
        worker.open("s", method="snapkv", budget=64, **options)
        worker.turn("s", words(400), generate=False)
        session = worker.engine.session("s")
        filling = fill_host_copy(worker.engine, worker.engine.swap_in(session))
        held.append(drive(filling)[0])
    assert held[0] is None
    assert held[1] is not None
    assert rows_alone < limit
    assert 0 < held[1].nbytes <= limit
