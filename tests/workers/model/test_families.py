"""Models of many types, built by transformers' own classes, say in sessions what `generate` says.

Or they are refused by name. Of one family: `pytest tests/workers/model/test_families.py -k gemma2`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reference import MODEL_PATH
from tests.workers.conftest import WAIT, answer_of
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.family import PROMPT, TOKENS, Family, words
from tests.workers.model.architectures.left_out import (
    forget_states,
    halve_windows,
    leave_out_rotated_keys,
    leave_out_scale,
    leave_out_sinks,
    leave_out_soft_cap,
)
from tests.workers.model.architectures.refused import REFUSED
from tests.workers.model.architectures.served import SERVED
from workers.errors import ModelRefused
from workers.model.loader import adopt
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = 0.5
"""Nats between an answer's next tokens and the model's own, on average. Without retrieval it is more."""

LEFT_OUT = [
    (leave_out_scale, "granite"),
    (leave_out_sinks, "gpt_oss"),
    (leave_out_sinks, "mimo_v2_flash"),
    (leave_out_soft_cap, "gemma2"),
    (halve_windows, "gemma2"),
    (halve_windows, "gemma3n_text"),
    (halve_windows, "gpt_oss"),
    (halve_windows, "llama4_text"),
    (forget_states, "qwen3_next"),
    (forget_states, "granitemoehybrid"),
    (forget_states, "lfm2"),
    (forget_states, "kimi_linear"),
    (leave_out_rotated_keys, "deepseek_v3"),
]
"""Parts of the pass, and models that have them."""


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    """The reference model's tokenizer."""
    return load_tokenizer(MODEL_PATH, (1,))


@pytest.fixture(scope="module", params=list(SERVED))
def family(
    request: pytest.FixtureRequest, chat: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    """One family after the other: all tests of one run before the next is built."""
    made = Family(SERVED[request.param], chat, tmp_path_factory.mktemp("rows"))
    yield made
    made.close()


def test_two_turns_are_those_of_generate(family: Family) -> None:
    """With every row active."""
    first, second = family.two_turns
    assert first.prompt_tokens > 256
    family.check_generated(first)
    family.check_generated(second, first.token_ids)
    family.worker.check()


def test_a_session_reopened_in_a_new_epoch_goes_on(family: Family) -> None:
    """From its committed state and its stored rows."""
    first, second = family.two_turns
    family.open("two", state=second.state, epoch=2)
    third = family.turn("two", words(16, 2), epoch=2)
    family.check_generated(third, [*first.token_ids, *second.token_ids])
    family.worker.check()


def test_an_answer_that_retrieves_every_evicted_row_is_exact(family: Family) -> None:
    """A quarter of the rows is active between the steps, and each step finds all others."""
    family.open("all", budget=480, method="icecache", layer_budgets="pyramid")
    done = family.turn("all", PROMPT)
    assert sum(done.memory.active_rows) <= 120 * len(done.memory.active_rows)
    assert done.memory.evicted_rows > 150
    assert done.retrieval.rows > 0
    family.check_answer(done)
    family.worker.check()


def test_a_small_budget_is_kept_and_the_answer_is_near(family: Family) -> None:
    """Of 96 rows per head and layer, 24 are active and 72 retrieved.

    The prompt is computed over all stored rows, and so the first token's logits are the model's own.
    """
    family.open("small", budget=96, method="icecache")
    with family.watch_logits() as seen:
        done = family.turn("small", PROMPT)
    distances = family.distances(done, seen)
    assert distances[0] < 1e-4
    assert sum(distances) / len(distances) < NEAR
    following = family.turn("small", words(24, 1))
    assert len(answer_of(following)) > 0
    for memory in (done.memory, following.memory):
        for peak, bound in zip(memory.peak_rows, memory.bound_rows, strict=True):
            assert peak <= bound
        assert max(memory.active_rows) <= 96
    family.worker.check()


def test_without_retrieval_such_an_answer_is_far(chat: ChatTokenizer, tmp_path: Path) -> None:
    """So the test above can fail."""
    family = Family(SERVED["granite"], chat, tmp_path)
    family.open("forgetful", budget=96, method="streaming_llm")
    with family.watch_logits() as seen:
        done = family.turn("forgetful", PROMPT)
    distances = family.distances(done, seen)
    family.close()
    assert sum(distances) / len(distances) > NEAR


def test_repairs_of_an_evicting_session_keep_its_cache_whole(family: Family) -> None:
    """One in a turn and one in the pause after it."""
    family.open("evicting", budget=112, method="snapkv", repair_rows=24)
    family.turn("evicting", PROMPT)
    second = family.turn("evicting", words(24, 1), repair=True)
    family.worker.check()
    paused = family.worker.repair("evicting", "copper market 27")
    family.worker.check()
    third = family.turn("evicting", words(8, 3))
    family.worker.check()
    assert second.repair.promoted
    assert paused.report.scored_rows > 0
    assert third.memory.evicted_rows > 150
    assert max(third.memory.active_rows) <= 112
    assert len(answer_of(third)) > 0


def test_a_fork_at_the_last_turn_says_what_its_parent_says(family: Family) -> None:
    family.open("parent")
    first = family.turn("parent", words(60, 4))
    family.open("child", state=first.state)
    child = family.turn("child", words(24, 5))
    parent = family.turn("parent", words(24, 5))
    assert list(child.token_ids) == list(parent.token_ids)
    family.check_answer(child, first.token_ids)
    family.worker.check()


def test_two_sessions_that_decode_together_say_what_each_says_alone(family: Family) -> None:
    passes = family.worker.engine.passes
    passes.clear()
    for _ in range(20):  # the first prompt is long enough for the second session to come
        for name in ("a", "b"):
            family.open(name)
        futures = [
            family.worker.submit("a", words(90, 7), max_tokens=TOKENS),
            family.worker.submit("b", words(60, 6), max_tokens=TOKENS),
        ]
        for future in futures:
            family.check_answer(future.result(WAIT))
        if (2, 1) in passes:
            break
    assert (2, 1) in passes, "of two sessions, a token each"
    family.worker.check()


def test_a_turn_after_a_stop_string_is_exact(family: Family) -> None:
    """What was generated behind the string is forgotten."""
    stop = find_stop(family.two_turns[0].message.content)
    family.open("stopped")
    first = family.turn("stopped", PROMPT, stop=[stop])
    assert stop not in family.worker.shown("stopped")
    second = family.turn("stopped", words(24, 1))
    assert first.finish_reason == "stop"
    family.check_answer(second, first.token_ids)
    family.worker.check()


def find_stop(text: str) -> str:
    """Find three characters in the middle of a text, where they come first."""
    for at in range(4, len(text) - 4):
        piece = text[at : at + 3]
        if (
            piece.isprintable()
            and piece.strip()
            and "\ufffd" not in piece
            and text.find(piece) == at
        ):
            return piece
    raise AssertionError(f"no stop string in {text!r}")


@pytest.mark.parametrize(
    ("leave_out", "name"), LEFT_OUT, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_part_that_is_left_out_is_noticed(
    leave_out: Callable[[pytest.MonkeyPatch], None],
    name: str,
    chat: ChatTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the comparison of answers, and when such a model is loaded."""
    family = Family(SERVED[name], chat, tmp_path)
    family.open("whole")
    family.check_answer(family.turn("whole", PROMPT))
    leave_out(monkeypatch)
    family.open("part")
    part = family.turn("part", PROMPT)
    family.close()
    with pytest.raises(AssertionError, match="not all tokens are transformers' own"):
        family.check_answer(part)
    with pytest.raises(ModelRefused, match="not computed as transformers computes it"):
        adopt(build(SERVED[name]))


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_model_that_is_not_served_is_refused_by_the_kind_of_its_layers(name: str) -> None:
    model = build(REFUSED[name])
    with pytest.raises(ModelRefused, match=REFUSED[name].refused):
        adopt(model)


def test_at_least_sixty_types_are_served() -> None:
    assert len({each.kind for each in SERVED.values()}) >= 60
