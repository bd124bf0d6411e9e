"""Recurrent states that the store has lost are computed again, from the last one that is left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from tests.workers.model.architectures.family import BUDGET, Family, words
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.tasks.turn_log import logged, rebuild
from workers.errors import RowsMissing
from workers.model.tokenizer import load_tokenizer

REBUILT = "pages rebuilt"


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    made = Family(RECURRENT["lfm2"], load_tokenizer(MODEL_PATH, (1,)), tmp_path)
    yield made
    made.close()


def lose(family: Family, *indices: int) -> None:
    """Lose states of session `s`, and forget it in memory."""
    stored = family.worker.engine.stored
    assert stored.states is not None
    assert stored.begin_flush("s").result()
    pages = [page for page in stored.states.page_ids("s", indices) if page is not None]
    for tier in stored.states._stack.tiers.all:
        tier.delete(pages)
    stored.release("s")


def talk(family: Family) -> tuple[list[pb.TurnDone], list[pb.LoggedTurn]]:
    """Run four turns."""
    family.open("s")
    texts = [words(60, seed) for seed in range(4)]
    done = [family.turn("s", text) for text in texts]
    return done, [logged(*turn) for turn in zip(done, texts, strict=True)]


@pytest.mark.parametrize("turns_back", [1, 2])
def test_a_session_goes_on_from_the_last_state_that_is_left(
    family: Family, turns_back: int
) -> None:
    """From the end of a turn: those after it are computed again."""
    done, turns = talk(family)
    state = done[-1].state
    following = family.turn("s", words(8, 9))
    left = done[-1 - turns_back].state
    lost = [index for index, at in enumerate(state.snapshots) if at > left.length]
    lose(family, *lost)
    with pytest.raises(RowsMissing, match="lost its recurrent state"):
        family.open("s", state=state, epoch=3)
    before = family.worker.engine.prefilled_tokens
    with capture_logs() as logs:
        rebuild(family.worker, state, turns, epoch=3, budget=BUDGET)
    assert [(log["pages"], log["states"]) for log in logs if log["event"] == REBUILT] == [([], 1)]
    computed = family.worker.engine.prefilled_tokens - before
    # Each turn computes again what was pending before it.
    pending = sum(len(each.state.pending) for each in done[-1 - turns_back :])
    assert 0 < computed <= state.length - left.length + pending
    again = family.turn("s", words(8, 9), epoch=3)
    assert list(again.token_ids) == list(following.token_ids)
    family.worker.check()


def test_without_any_state_the_whole_log_is_computed(family: Family) -> None:
    done, turns = talk(family)
    state = done[-1].state
    following = family.turn("s", words(8, 9))
    lose(family, *range(len(state.snapshots)))
    before = family.worker.engine.prefilled_tokens
    rebuild(family.worker, state, turns, epoch=3, budget=BUDGET)
    assert family.worker.engine.prefilled_tokens - before >= state.length
    again = family.turn("s", words(8, 9), epoch=3)
    assert list(again.token_ids) == list(following.token_ids)


def test_a_state_that_a_forks_parent_dropped_is_computed_again(family: Family) -> None:
    family.open("parent")
    texts = [words(60, seed) for seed in range(2)]
    done = [family.turn("parent", text) for text in texts]
    state = done[-1].state
    family.open("s", state=state)
    lose(family, list(state.snapshots).index(state.length))
    turns = [logged(*turn) for turn in zip(done, texts, strict=True)]
    with capture_logs() as logs:
        rebuild(family.worker, state, turns, epoch=2, budget=BUDGET)
    assert [(log["pages"], log["states"]) for log in logs if log["event"] == REBUILT] == [([], 1)]
    following = family.turn("s", words(8, 9), epoch=2)
    assert list(following.token_ids) == list(family.turn("parent", words(8, 9)).token_ids)
    family.worker.check()
