"""A map of a committed state equals the selection that the worker itself has, row by row."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.row_map import ACTIVE, PROMOTED, map_rows
from workers.errors import BadSettings, IncompatibleState

NUMBERS = count()


def read_selection(worker: Any, name: str) -> dict[tuple[int, int, int], int]:
    """What is active: ACTIVE or PROMOTED by token, layer and head, from the worker's own cache."""
    engine = worker.engine
    selection = engine.session(name).active_selection(engine.cache)
    return {
        (int(token), layer, head): PROMOTED if bool(promoted) else ACTIVE
        for layer, (positions, flags) in enumerate(
            zip(selection.positions, selection.promoted, strict=True)
        )
        for head, (tokens, marks) in enumerate(zip(positions, flags, strict=True))
        for token, promoted in zip(tokens, marks, strict=True)
        if int(token) != EMPTY
    }


def ask(worker: Any, state: pb.SessionState, **fields: Any) -> pb.MapRowsResult:
    engine = worker.engine
    request = pb.MapRowsRequest(state=state, **{"start": 0, "stop": state.length, **fields})
    return map_rows(request, engine.model.shape, engine.settings)


def scale(active: int, rows: int) -> int:
    """A cell's byte, of exact shares."""
    if active in (0, rows):
        return 255 if active else 0
    return min(254, max(1, active * 255 // rows))


@pytest.fixture
def worker(make_worker: Callable[..., Any]) -> Any:
    return make_worker("reference", block_tokens=24, recent=8)


@settings(
    max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_cells_and_tokens_of_random_sessions_are_those_of_their_selections(
    data: st.DataObject, worker: Any, words: Callable[..., str]
) -> None:
    name = f"s{next(NUMBERS)}"
    method = data.draw(st.sampled_from(["snapkv", "keydiff", "full", "chunkkv"]))
    repair_rows = data.draw(st.sampled_from([0, 12]))
    budget = data.draw(st.integers(40, 90))
    worker.open(
        name, method=method, budget=1024 if method == "full" else budget, repair_rows=repair_rows
    )
    for turn in range(data.draw(st.integers(1, 3))):
        worker.turn(name, words(data.draw(st.integers(3, 50)), seed=turn), max_tokens=6)
    if repair_rows and method != "full" and data.draw(st.booleans()):
        worker.repair(name, text=words(4, seed=9))
    state = worker.engine.snapshot(worker.engine.session(name))
    active = read_selection(worker, name)
    start = data.draw(st.integers(0, state.length))
    stop = data.draw(st.integers(start, state.length))
    columns = data.draw(st.integers(1, 80))
    head = data.draw(st.one_of(st.none(), st.integers(0, 1)))
    shape = worker.engine.model.shape

    mapped = ask(worker, state, start=start, stop=stop, columns=columns, head=head, tokens=True)

    n = stop - start
    marks = [
        active.get((token, layer, each), 0)
        for token in range(start, stop)
        for layer in range(shape.n_layers)
        for each in range(shape.n_kv_heads)
    ]
    assert list(mapped.rows) == marks
    heads = range(shape.n_kv_heads) if head is None else [head]
    columns = min(columns, n)
    for layer, cells in enumerate(mapped.layers):
        for column in range(columns):
            tokens = range(start + column * n // columns, start + (column + 1) * n // columns)
            found = [active.get((token, layer, each), 0) for token in tokens for each in heads]
            rows = len(found)
            assert cells.active[column] == scale(sum(mark > 0 for mark in found), rows)
            assert cells.promoted[column] == scale(found.count(PROMOTED), rows)
        assert len(cells.active) == len(cells.promoted) == columns
    assert len(mapped.layers) == (shape.n_layers if n else 0)
    worker.scheduler.delete(pb.DeleteRequest(session=name)).result()


def test_scores_are_those_that_the_state_keeps(worker: Any, words: Callable[..., str]) -> None:
    worker.open(method="snapkv", budget=60)
    state = worker.turn("s", words(90), max_tokens=4).state
    kept = worker.engine.session("s").eviction_scores
    scores = ask(worker, state, tokens=True).scores
    known = {token: score for token, score in enumerate(scores) if score == score}
    assert known == dict(zip(kept.tokens.tolist(), kept.scores.tolist(), strict=True))
    assert 0 < len(known) < state.length


def test_a_session_without_tokens_and_an_empty_range_have_no_cells(
    worker: Any, words: Callable[..., str]
) -> None:
    assert not ask(worker, pb.SessionState(), columns=8, tokens=True).layers
    worker.open(method="snapkv", budget=60)
    state = worker.turn("s", words(20), max_tokens=2).state
    empty = ask(worker, state, start=5, stop=5, columns=8, tokens=True)
    assert (empty.rows, list(empty.layers), empty.sinks, empty.recent) == (b"", [], 4, 8)


def test_a_head_that_is_not_there_and_a_damaged_or_newer_state_are_refused(
    worker: Any, words: Callable[..., str]
) -> None:
    worker.open(method="snapkv", budget=60)
    state = worker.turn("s", words(20), max_tokens=2).state
    with pytest.raises(BadSettings, match="no KV head 99"):
        ask(worker, state, columns=1, head=99)
    damaged = pb.SessionState.FromString(state.SerializeToString())
    damaged.selection = damaged.selection[:5]
    with pytest.raises(IncompatibleState, match="selection"):
        ask(worker, damaged, columns=1)
    state.state_version = 99
    with pytest.raises(IncompatibleState):
        ask(worker, state, columns=1)


def test_a_map_changes_nothing_in_the_worker(worker: Any, words: Callable[..., str]) -> None:
    worker.open(method="snapkv", budget=60)
    state = worker.turn("s", words(60), max_tokens=2).state
    before = state.SerializeToString(deterministic=True)
    swaps = worker.engine.passes[:]
    ask(worker, state, columns=16, tokens=True)
    assert state.SerializeToString(deterministic=True) == before
    assert worker.engine.passes == swaps
