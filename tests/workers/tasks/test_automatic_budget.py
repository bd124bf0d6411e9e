"""Sessions without a budget of their own: all rows are active while they fit, then an eighth."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.domain.sessions.automatic_budget import LEAST
from kvrecall.protocol.v1 import worker_pb2 as pb

# A slot holds a little more than the least automatic budget, so that texts stay short.
MOST = LEAST + 64
LIMITS: dict[str, Any] = {"block_tokens": 128, "recent": 8, "slots": 2, "max_budget": MOST}
AUTOMATIC: dict[str, Any] = {"budget": 0, "method": "icecache"}


def grow(worker: Any, words: Callable[..., str], name: str, tokens: int, **options: Any) -> Any:
    """Append texts until the session has so many tokens; the last turn."""
    seed = 0
    done = None
    while done is None or done.memory.length < tokens:
        done = worker.turn(name, words(60, seed=seed), generate=False, **options)
        seed += 1
    return done


def test_all_rows_stay_active_while_they_fit_and_an_eighth_of_a_longer_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **AUTOMATIC)
    few = grow(worker, words, "s", 600)
    assert set(few.memory.active_rows) == {few.memory.length}
    assert few.memory.budget == MOST
    many = grow(worker, words, "s", MOST + 200)
    config = worker.engine.sessions["s"].config
    assert (config.budget, many.memory.budget) == (LEAST, LEAST)
    assert config.retrieved == LEAST * 3 // 4
    kept = LEAST // 4 - many.memory.unsettled  # of what an eviction has left, the whole pages
    assert set(many.memory.active_rows) == {kept}
    assert max(many.memory.peak_rows) <= max(many.memory.bound_rows)
    worker.check()


def test_an_answer_that_outgrows_its_slot_goes_on_with_retrieval(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The budget is chosen anew within the turn, when the first rows leave."""
    worker = make_worker(**LIMITS)
    worker.open("s", **AUTOMATIC)
    before = grow(worker, words, "s", MOST - 100)
    room = before.memory.bound_rows[0] - before.memory.length
    never = [pb.TokenBias(id=end, bias=-100.0) for end in worker.engine.tokenizer.eos_token_ids]
    done = worker.turn("s", "and then", max_tokens=room + 20, logit_bias=never)
    assert done.output_tokens == room + 20
    assert 0 < done.retrieval.steps < done.output_tokens
    worker.check()


@pytest.mark.parametrize("tokens", [600, MOST + 200])
def test_a_session_that_is_opened_again_has_the_same_budget_and_answers(
    tokens: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **AUTOMATIC)
    state = grow(worker, words, "s", tokens).state
    config = worker.engine.sessions["s"].config
    ours = worker.turn("s", "and then", max_tokens=12)
    worker.open("s", epoch=2, state=state, **AUTOMATIC)
    assert worker.engine.sessions["s"].config.layer_rows == config.layer_rows
    again = worker.turn("s", "and then", epoch=2, max_tokens=12)
    assert again.token_ids == ours.token_ids
    assert again.state == ours.state


def test_budgets_that_are_split_unevenly_are_what_a_slot_holds(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Their layers hold different numbers of rows from the first eviction on."""
    worker = make_worker(**LIMITS)
    worker.open("s", budget=0, method="pyramidkv")
    done = grow(worker, words, "s", MOST + 200)
    assert done.memory.budget == MOST
    assert not worker.engine.sessions["s"].config.automatic
    worker.check()
