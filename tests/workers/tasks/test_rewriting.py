"""A session holds what its chat template says of the whole conversation: earlier reasoning is dropped."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.byte_level import make_byte_level
from tests.workers.conftest import WAIT, answer_of
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.family import Family, words
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.recurrent import RECURRENT
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
from tests.workers.tasks.thinking_talk import PAGE, Talk, result, said, user
from tests.workers.tasks.turn_log import rebuild
from workers.engine.settings import WorkerSettings
from workers.model.tokenizer import ChatTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 2048
"""Rows of a slot."""
FULL: dict[str, Any] = {"budget": ROWS}
RECALLING: dict[str, Any] = {"method": "icecache", "budget": 160}
KINDS = {"dense": DENSE["qwen3"], "windows": WINDOWED["gpt_oss"], "states": RECURRENT["lfm2"]}
THOUGHT = "I look at it\nfrom all sides. " * 6


@pytest.fixture(scope="module")
def qwen() -> ChatTokenizer:
    """A tokenizer of bytes with the template of Qwen3."""
    inner = make_byte_level(QWEN3, QWEN3_END, QWEN3_MARKS, QWEN3_ADDED)
    return ChatTokenizer(inner, (inner.eos_token_id,))


@pytest.fixture(scope="module")
def harmony() -> ChatTokenizer:
    """A tokenizer of bytes with the template of gpt-oss."""
    inner = make_byte_level(HARMONY, HARMONY_END, HARMONY_MARKS)
    call = inner.get_added_vocab()["<|call|>"]
    return ChatTokenizer(inner, (inner.eos_token_id, call))


@pytest.fixture(params=["dense-qwen", "windows-harmony", "states-qwen", "states-harmony"])
def family(
    request: pytest.FixtureRequest,
    qwen: ChatTokenizer,
    harmony: ChatTokenizer,
    tmp_path: Path,
) -> Iterator[Family]:
    """A tiny model with a template that drops reasoning."""
    kind, template = request.param.split("-")
    chat = {"qwen": qwen, "harmony": harmony}[template]
    made = make_family(KINDS[kind], chat, tmp_path)
    yield made
    made.close()


def make_family(architecture: Architecture, chat: ChatTokenizer, path: Path) -> Family:
    """A model with the tokenizer's vocabulary."""
    size = {"vocab_size": len(chat.inner)}
    sized = replace(architecture, settings={**architecture.settings, **size})
    return Family(sized, chat, path, WorkerSettings(slots=3, max_budget=ROWS, block_tokens=64))


def talk_with_tools(talk: Talk) -> None:
    """A question, two calls with reasoning before each, and an answer with reasoning."""
    talk.say(user(words(30)))
    talk.say(said("", THOUGHT, "c1"))
    talk.say(result(words(20, 1), "c1"))
    talk.say(said("", f"Then {THOUGHT}", "c2"))
    talk.say(result(words(12, 2), "c2"))
    talk.say(said(words(10, 3), f"So {THOUGHT}"))


def check_like_fresh(talk: Talk, **spec: Any) -> None:
    """Check that the session's tokens, rows and next answer are those of a new one with all messages."""
    worker = talk.family.worker
    fresh = Talk(talk.family, "fresh", **spec)
    messages = [
        {
            "role": message.role,
            "content": message.content,
            "reasoning": message.reasoning,
            "tool_calls": message.tool_calls,
            "tool_call_id": message.tool_call_id,
        }
        for message in talk.messages
    ]
    fresh.say(*messages)
    decode = talk.family.tokenizer.decode
    assert decode(talk.log.tokens) == decode(fresh.log.tokens)
    assert talk.log.tokens == fresh.log.tokens
    rows = min(talk.log.rows, fresh.log.rows)
    assert rows >= PAGE
    positions = torch.arange(rows)
    ours, theirs = (worker.engine.store.gather(name, positions) for name in (talk.name, "fresh"))
    assert torch.allclose(ours, theirs, atol=2e-3)
    asked = user("And now?")
    assert answer_of(talk.say(asked, generate=True)) == answer_of(fresh.say(asked, generate=True))
    worker.check()


def test_the_reasoning_of_a_tool_loop_is_dropped_at_the_next_user_message(family: Family) -> None:
    talk = Talk(family, **FULL)
    talk_with_tools(talk)
    text = family.tokenizer.decode(talk.log.tokens)
    assert text.count(THOUGHT.strip()) == 3, "kept within the loop"
    before = len(talk.log.tokens)
    done = talk.say(user(words(8, 4)))
    assert THOUGHT.strip() not in family.tokenizer.decode(talk.log.tokens)
    assert done.rewrite.kept < before - 3 * len(THOUGHT)
    assert done.memory.dropped_tokens >= 3 * len(THOUGHT.strip())
    check_like_fresh(talk, **FULL)


@pytest.mark.parametrize("spec", [FULL, RECALLING], ids=["full", "recalling"])
def test_what_follows_is_dropped_again(family: Family, spec: dict[str, Any]) -> None:
    talk = Talk(family, **spec)
    for number in range(3):
        talk.say(user(words(20, number)))
        talk.say(said(words(12, 10 + number), THOUGHT))
    talk.say(user(words(5, 5)))
    assert [turn.HasField("rewrite") for turn in talk.turns] == [
        *(False, False, True, False, True, False, True)
    ]
    check_like_fresh(talk, **spec)


@pytest.mark.parametrize("number", [3, 6, 7, 8])
def test_a_session_goes_on_in_a_new_epoch_from_before_and_after(
    family: Family, number: int
) -> None:
    talk = Talk(family, **FULL)
    talk_with_tools(talk)
    talk.say(user(words(8, 4)))
    talk.say(said(words(9, 5), THOUGHT))
    then = talk.done[number - 1].state
    talk.reopen(number)
    assert talk.log.rows == then.length
    rest = [user(words(6, 6))]
    if number == 3:
        rest = [said("", THOUGHT, "c3"), result("none", "c3"), said("so", THOUGHT), *rest]
    for message in rest:
        talk.say(message)
    check_like_fresh(talk, **FULL)


@pytest.mark.parametrize("number", [6, 7, 8])
@pytest.mark.parametrize("replays", [False, True])
def test_forks_before_and_after_are_the_session_as_it_was(
    family: Family, number: int, replays: bool
) -> None:
    talk = Talk(family, **FULL)
    talk_with_tools(talk)
    talk.say(user(words(8, 4)))
    talk.say(said(words(9, 5), THOUGHT))
    state = talk.done[number - 1].state
    log = talk.turns[:number]
    if replays:
        forked = family.worker.fork("s", "child", log, budget=ROWS).state
        assert forked.length == state.length
        assert list(forked.pending) == list(state.pending)
    else:
        family.worker.open("child", state=state, budget=ROWS)
    child = Talk.__new__(Talk)
    child.__dict__ |= talk.__dict__ | {
        "name": "child",
        "turns": log,
        "done": talk.done[:number],
    }
    child.say(user(words(6, 6)))
    check_like_fresh(child, **FULL)


@pytest.mark.parametrize("spec", [FULL, RECALLING], ids=["full", "recalling"])
def test_lost_pages_and_states_are_computed_again(family: Family, spec: dict[str, Any]) -> None:
    talk = Talk(family, **spec)
    talk_with_tools(talk)
    talk.say(user(words(8, 4)))
    talk.say(said(words(9, 5), THOUGHT))
    state = talk.done[-1].state
    positions = torch.arange(state.length)
    store = family.worker.engine.store
    before = store.gather("s", positions)
    family.worker.scheduler.delete(pb.DeleteRequest(session="s")).result(WAIT)
    request = pb.DeletePagesRequest(page_ids=state.page_ids)
    assert family.worker.scheduler.delete_pages(request).result(WAIT) == state.length // PAGE
    rebuild(family.worker, state, talk.turns, epoch=2, **{"budget": ROWS, **spec})
    talk.epoch = 2
    assert torch.equal(store.gather("s", positions), before)
    talk.say(user(words(6, 6)))
    check_like_fresh(talk, **spec)


def test_a_reasoning_that_was_generated_is_dropped(qwen: ChatTokenizer, tmp_path: Path) -> None:
    """The prompt begins it, and the answer is cut off in it."""
    family = make_family(KINDS["dense"], qwen, tmp_path)
    talk = Talk(family, **FULL, options='{"template_arguments": "{\\"opened\\": true}"}')
    done = talk.say(user(words(30)), generate=True, max_tokens=80)
    assert done.message.reasoning
    assert not done.message.content
    again = talk.say(user("And?"))
    text = family.tokenizer.decode(talk.log.tokens)
    assert "<think>" not in text
    assert again.rewrite.kept == 64 * (len(words(30)) // 64) or again.rewrite.kept > 0
    assert text.count("<|im_start|>assistant\n<|im_end|>") == 1
    family.close()


def test_nothing_is_rewritten_without_the_log_or_where_it_is_kept(
    qwen: ChatTokenizer, tmp_path: Path
) -> None:
    family = make_family(KINDS["dense"], qwen, tmp_path)
    talk = Talk(family, **FULL, options='{"keep_reasoning": true}')
    talk.say(user("One?"), said("one", THOUGHT), user("Two?"), said("two", THOUGHT))
    assert family.tokenizer.decode(talk.log.tokens).count(THOUGHT.strip()) == 2
    family.close()
