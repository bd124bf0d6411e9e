"""A turn that remembers sees rows of other sessions, and its session keeps none of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from tests.workers.model.architectures.family import Family
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.tasks.turn_log import PAGE_TOKENS, logged, rebuild
from workers.engine.settings import WorkerSettings
from workers.errors import MalformedMessage
from workers.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8, "max_budget": 1024}
ONE_LAYER = "one layer"
"""Rows of its layer follow from a token and its position alone, whatever stands before."""
ACTIVE: dict[str, Any] = {"method": "icecache", "budget": 1024}
"""All rows stay active."""
ALL: dict[str, Any] = {
    "method": "icecache",
    "budget": 1000,
    "layer_budgets": "pyramid",
    "method_settings": '{"share": 0.9}',
}
"""100 rows are active, and all others retrieved."""
FEW: dict[str, Any] = {"method": "icecache", "budget": 48, "method_settings": '{"share": 0.4}'}
SYSTEM = {"role": "system", "content": "river station"}


def cut_passage(done: pb.TurnDone, start: int, stop: int) -> pb.Passage:
    """Tokens start .. stop-1 of a session as a turn has left it."""
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    ids = done.state.page_ids[first * ID_BYTES : last * ID_BYTES]
    return pb.Passage(page_ids=ids, start=start, stop=stop)


def say(worker: Any, name: str, text: str) -> tuple[pb.TurnDone, list[int]]:
    """Say something in a new session with recall, without an answer; returns its tokens as well."""
    worker.open(name, **ACTIVE)
    done = worker.turn(name, text, generate=False)
    return done, list(done.token_ids)


@pytest.mark.parametrize("spec", [ACTIVE, ALL, FEW], ids=["active", "retrieved", "few"])
def test_rows_that_follow_from_their_tokens_answer_as_the_text_does(
    spec: dict[str, Any],
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    """In a first turn behind its system message, in a later one behind all that was said."""
    worker = make_worker(ONE_LAYER, **LIMITS)
    earlier, tokens = say(worker, "earlier", words(160, seed=5))
    spans = [(70, 130), (10, 50)]
    remembered = [cut_passage(earlier, *span) for span in spans]
    seen = [token for start, stop in spans for token in tokens[start:stop]]
    worker.open("s", **spec)
    said: list[int] = []
    for turn in range(3):
        asked = {"role": "user", "content": words(20, seed=turn)}
        messages = [asked] if turn else [SYSTEM, asked]
        done = worker.turn("s", messages, max_tokens=12, remembered=remembered)
        prompt = list(done.token_ids[: done.prompt_tokens])
        behind = len(said) + done.remembered.behind
        text = [*said, *prompt]
        expected = continuation(ONE_LAYER, [*text[:behind], *seen, *text[behind:]], 12)
        if spec is not FEW:
            assert answer(done) == expected, turn
        assert done.remembered.tokens == len(seen)
        assert done.remembered.passages == 2
        assert turn or 0 < done.remembered.behind < len(prompt) - 20
        said += done.token_ids
        said_rows = done.state.length + len(done.state.pending)
        assert said_rows == len(said)
    worker.check()


def test_without_the_rows_it_says_something_else(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    """So the test above can fail."""
    worker = make_worker(ONE_LAYER, **LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    answers = []
    for name, remembered in (("s", [cut_passage(earlier, 10, 130)]), ("t", [])):
        worker.open(name, **ACTIVE)
        messages = [SYSTEM, {"role": "user", "content": words(20)}]
        answers.append(answer(worker.turn(name, messages, remembered=remembered)))
    assert answers[0] != answers[1]


def test_a_passage_behind_the_window_of_its_own_session_answers_as_its_text(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    worker = make_worker(ONE_LAYER, window=192, **LIMITS)
    worker.open("earlier", **ACTIVE)
    tokens: list[int] = []
    for seed in range(4):
        earlier = worker.turn("earlier", words(90, seed=seed), generate=False)
        tokens += earlier.token_ids
    start, stop = 300, 370
    assert earlier.state.length >= stop
    worker.open("s", **ACTIVE)
    messages = [SYSTEM, {"role": "user", "content": words(20)}]
    done = worker.turn("s", messages, remembered=[cut_passage(earlier, start, stop)], max_tokens=8)
    prompt = list(done.token_ids[: done.prompt_tokens])
    behind = done.remembered.behind
    text = [*prompt[:behind], *tokens[start:stop], *prompt[behind:]]
    assert answer(done) == continuation(ONE_LAYER, text, 8)


def test_a_session_behind_its_window_remembers(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    """Its rows lie at the places of chunks, the passage's right before the message."""
    worker = make_worker(window=192, **LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    answers = []
    for name, remembered in (("s", [cut_passage(earlier, 10, 130)]), ("t", [])):
        worker.open(name, **FEW)
        for seed in range(4):
            worker.turn(name, words(90, seed=seed), generate=False)
        done = worker.turn(name, words(40, seed=9), remembered=remembered)
        assert done.state.length > 192
        answers.append(answer(done))
    assert answers[0] != answers[1]
    worker.check()


@pytest.mark.parametrize("spec", [ACTIVE, FEW], ids=["active", "few"])
def test_the_session_keeps_the_rows_of_its_own_tokens(
    spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The same as one that was told the same and remembers nothing."""
    worker = make_worker(**LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", **spec)
    worker.open("told", **spec)
    for seed in range(3):
        said = words(60, seed=seed)
        remembered = [cut_passage(earlier, 10, 130)]
        assert worker.turn("s", said, generate=False, remembered=remembered).remembered.tokens
        worker.turn("told", said, generate=False)
    settled = worker.scheduler.settle(pb.SettleRequest(session="s", epoch=1)).result(600).state
    told = worker.scheduler.settle(pb.SettleRequest(session="told", epoch=1)).result(600).state
    assert settled.length == told.length >= 3 * PAGE_TOKENS
    assert settled.page_ids == told.page_ids
    at = torch.arange(settled.length)
    store = worker.engine.store
    assert torch.allclose(store.gather("s", at), store.gather("told", at), atol=1e-4)
    worker.check()


@pytest.mark.parametrize("page", [0, 2])
def test_a_lost_page_is_computed_again_without_what_the_turn_remembered(
    page: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    worker = make_worker(**LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", **FEW)
    log = []
    for seed in range(3):
        text = words(90, seed=seed)
        done = worker.turn("s", text, remembered=[cut_passage(earlier, 10, 130)])
        log.append(logged(done, text))
    state = done.state
    expected = answer(worker.turn("s", words(20, seed=9)))
    worker.open("s", state=state, epoch=3, **FEW)
    lose_page(worker.engine.store, "s", page)
    assert rebuild(worker, state, log, epoch=4, **FEW).pages == 1
    assert answer(worker.turn("s", words(20, seed=9), epoch=4)) == expected


def test_passages_whose_pages_are_not_stored_are_left_out(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", **ACTIVE)
    unknown = pb.Passage(page_ids=b"x" * ID_BYTES, start=0, stop=9)
    here = cut_passage(earlier, 10, 20)
    done = worker.turn("s", words(20), remembered=[unknown, here])
    assert done.remembered.left_out == 1
    assert done.remembered.passages == 1
    assert done.remembered.tokens == 10
    done = worker.turn("s", words(20), remembered=[unknown])
    assert (done.remembered.left_out, done.remembered.tokens) == (1, 0)
    worker.check()


def test_a_session_without_recall_remembers_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", budget=1024)
    done = worker.turn("s", words(20), remembered=[cut_passage(earlier, 10, 20)])
    assert (done.remembered.left_out, done.remembered.tokens) == (1, 0)


def test_a_passage_of_other_pages_than_its_tokens_is_refused(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **ACTIVE)
    wrong = pb.Passage(page_ids=b"x" * ID_BYTES, start=0, stop=PAGE_TOKENS + 1)
    with pytest.raises(MalformedMessage, match="is in 2 pages of 64, got 1"):
        worker.turn("s", words(20), remembered=[wrong])


def test_a_model_with_recurrent_states_remembers_in_its_other_layers(tmp_path: Any) -> None:
    tokenizer = load_tokenizer(MODEL_PATH, (1,))
    settings = WorkerSettings(slots=2, max_budget=1024, block_tokens=32, recent=8)
    family = Family(RECURRENT["qwen3_next"], tokenizer, tmp_path, settings)
    try:
        check_hybrid(family.worker)
    finally:
        family.close()


def check_hybrid(worker: Any) -> None:
    """Check that a session remembers, and goes on as one that was told the same."""
    text = " ".join(f"river {number} lamp" for number in range(60))
    earlier, _ = say(worker, "earlier", text)
    worker.open("s", **ACTIVE)
    worker.open("told", **ACTIVE)
    for number in range(3):
        said = f"station {number} north " * 12
        remembered = [cut_passage(earlier, 10, 100)]
        done = worker.turn("s", said, generate=False, remembered=remembered)
        assert done.remembered.tokens == 90
        worker.turn("told", said, generate=False)
    last = "copper market"
    assert worker.turn("s", last).token_ids == worker.turn("told", last).token_ids


def test_a_model_with_windows_remembers_nothing(tmp_path: Any) -> None:
    tokenizer = load_tokenizer(MODEL_PATH, (1,))
    settings = WorkerSettings(slots=2, max_budget=1024, block_tokens=32, recent=8)
    family = Family(WINDOWED["gemma3_text"], tokenizer, tmp_path, settings)
    try:
        earlier, _ = say(family.worker, "earlier", "river lamp " * 60)
        family.worker.open("s", **ACTIVE)
        done = family.worker.turn("s", "north", remembered=[cut_passage(earlier, 10, 60)])
        assert done.remembered.left_out == 1
    finally:
        family.close()
