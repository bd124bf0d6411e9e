"""A chat template that inserts today's date says it once: what a session holds stays as it was rendered."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.byte_level import make_byte_level
from tests.workers.conftest import WAIT, answer_of
from tests.workers.model.architectures.family import Family, words
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.model.thinking import (
    HARMONY,
    HARMONY_END,
    HARMONY_MARKS,
    QWEN3,
    QWEN3_ADDED,
    QWEN3_END,
    QWEN3_MARKS,
)
from tests.workers.tasks.thinking_talk import Talk, said, user
from tests.workers.tasks.turn_log import rebuild
from workers.engine.settings import WorkerSettings
from workers.errors import BadMessages
from workers.model import one_rendering
from workers.model.tokenizer import ChatTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 1024
TODAY = "Today is {{ strftime_now('%d %B %Y') }}."
DATED_QWEN = f"<|im_start|>system\n{TODAY}<|im_end|>\n{QWEN3}"
DATED_HARMONY = HARMONY.replace("You answer.", TODAY)
FIRST, SECOND = "Today is 31 December 2030.", "Today is 01 January 2031."
THOUGHT = "I look at it. " * 6


@dataclass
class Clock:
    """The time of this machine, as a template and the rendering read it."""

    time: datetime
    readings: int | None = None

    def now(self) -> datetime:
        """Read the time; behind so many readings it is the next day."""
        if self.readings is not None:
            self.readings -= 1
            if self.readings < 0:
                self.end_day()
        return self.time

    def end_day(self) -> None:
        """Go on to the next day."""
        self.time += timedelta(days=1)
        self.readings = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands until the test moves it."""
    clock = Clock(datetime(2030, 12, 31, 23, 59))
    for module in (chat_template_utils, one_rendering):
        monkeypatch.setattr(module, "datetime", clock)
    return clock


@pytest.fixture(params=["qwen", "harmony"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Family]:
    """A tiny model whose template inserts the date, and drops reasoning."""
    if request.param == "qwen":
        inner = make_byte_level(DATED_QWEN, QWEN3_END, QWEN3_MARKS, QWEN3_ADDED)
        kind, ends = DENSE["qwen3"], [inner.eos_token_id]
    else:
        inner = make_byte_level(DATED_HARMONY, HARMONY_END, HARMONY_MARKS)
        kind = WINDOWED["gpt_oss"]
        ends = [inner.eos_token_id, inner.get_added_vocab()["<|call|>"]]
    sized = replace(kind, settings={**kind.settings, "vocab_size": len(inner)})
    settings = WorkerSettings(slots=3, max_budget=ROWS, block_tokens=64)
    made = Family(sized, ChatTokenizer(inner, tuple(ends)), tmp_path, settings)
    yield made
    made.close()


def begin(family: Family, name: str) -> Talk:
    """A session with a question and an answer that was reasoned."""
    talk = Talk(family, name, budget=ROWS)
    talk.say(user(words(30)))
    talk.say(said(words(12, 1), THOUGHT))
    return talk


def test_a_session_goes_on_unchanged_when_the_date_changes(family: Family, clock: Clock) -> None:
    talk, twin = begin(family, "s"), begin(family, "twin")
    asked = user(words(9, 2))
    expected = twin.say(asked, generate=True)
    clock.end_day()
    went_on = talk.say(asked, generate=True)
    assert talk.log.tokens == twin.log.tokens
    assert answer_of(went_on) == answer_of(expected)
    assert went_on.prompt_tokens == expected.prompt_tokens, "nothing of before is computed again"
    text = family.tokenizer.decode(talk.log.tokens)
    assert FIRST in text
    assert SECOND not in text
    assert THOUGHT.strip() not in text, "it is rewritten all the same"
    new = Talk(family, "new", budget=ROWS)
    new.say(asked)
    assert SECOND in family.tokenizer.decode(new.log.tokens)


@pytest.mark.parametrize("pages_are_lost", [False, True])
def test_a_session_that_is_opened_on_another_day_has_the_same_tokens(
    family: Family, clock: Clock, pages_are_lost: bool
) -> None:
    talk, twin = begin(family, "s"), begin(family, "twin")
    asked, then = user(words(9, 2)), user(words(7, 3))
    for each in (talk, twin):
        each.say(asked, generate=True)
    expected = twin.say(then, generate=True)
    clock.end_day()
    if pages_are_lost:
        state = talk.done[-1].state
        scheduler = family.worker.scheduler
        for name in ("s", "twin"):
            scheduler.delete(pb.DeleteRequest(session=name)).result(WAIT)
        request = pb.DeletePagesRequest(page_ids=state.page_ids)
        assert scheduler.delete_pages(request).result(WAIT)
        rebuild(family.worker, state, talk.turns, epoch=2, budget=ROWS)
        talk.epoch = 2
    else:
        talk.reopen()
    assert answer_of(talk.say(then, generate=True)) == answer_of(expected)
    assert talk.log.tokens == twin.log.tokens


@pytest.mark.parametrize("readings", range(8))
def test_the_date_may_change_while_a_turn_is_rendered(
    family: Family, clock: Clock, readings: int
) -> None:
    talk, twin = begin(family, "s"), begin(family, "twin")
    messages = [user(words(9, 2)), said(words(5, 3)), user(words(7, 4))]
    twin.say(*messages)
    clock.readings = readings
    talk.say(*messages)
    assert talk.log.tokens == twin.log.tokens
    clock.readings = readings
    new = Talk(family, "new", budget=ROWS)
    new.say(*messages)
    text = family.tokenizer.decode(new.log.tokens)
    assert text.count("Today is ") == 1


def test_what_a_template_refuses_it_refuses_on_every_day(family: Family, clock: Clock) -> None:
    family.tokenizer.inner.chat_template = "{{ strftime_now('%d') }}{{ raise_exception('no') }}"
    talk = Talk(family, budget=ROWS)
    clock.readings = 1
    with pytest.raises(BadMessages, match="no"):
        talk.say(user("hello"))
