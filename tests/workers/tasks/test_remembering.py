"""A turn that remembers sees rows of other sessions, and its session keeps none of them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from tests.workers.conftest import answer_of
from tests.workers.model.architectures.architecture import Architecture
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
SPANS = ((70, 130), (10, 50))


def cut_passage(
    done: pb.TurnDone, start: int, stop: int, tokens: Sequence[int] | None = None
) -> pb.Passage:
    """Tokens start .. stop-1 of a session as a turn has left it; tokens: all of it, if of several turns."""
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    ids = done.state.page_ids[first * ID_BYTES : last * ID_BYTES]
    said = list(done.token_ids if tokens is None else tokens)[start:stop]
    return pb.Passage(page_ids=ids, start=start, stop=stop, token_ids=said)


def say(worker: Any, name: str, text: str) -> tuple[pb.TurnDone, list[int]]:
    """Say something in a new session with recall, without an answer; returns its tokens as well."""
    worker.open(name, **ACTIVE)
    done = worker.turn(name, text, generate=False)
    return done, list(done.token_ids)


def check_turns(
    worker: Any, remembered: Sequence[pb.Passage], go_on: Callable[[list[int], int], list[int]]
) -> int:
    """Check that three turns answer as with the passages' text before their message.

    go_on: what the full cache says behind some tokens. Returns how many tokens a turn prefilled of them.
    """
    seen = [token for each in remembered for token in each.token_ids]
    said: list[int] = []
    for turn in range(3):
        asked = {"role": "user", "content": f"river {turn} lamp seven blue station " * 3}
        messages = [asked] if turn else [SYSTEM, asked]
        done = worker.turn("s", messages, max_tokens=12, remembered=remembered)
        text = [*said, *done.token_ids[: done.prompt_tokens]]
        behind = len(said) + done.remembered.behind
        assert answer_of(done) == go_on([*text[:behind], *seen, *text[behind:]], 12), turn
        assert done.remembered.passages == len(remembered)
        assert done.remembered.tokens == len(seen)
        assert turn or 0 < done.remembered.behind < done.prompt_tokens - 20
        said += done.token_ids
        assert done.state.length + len(done.state.pending) == len(said)
    worker.check()
    prefilled: int = done.remembered.prefilled_tokens
    return prefilled


@pytest.mark.parametrize("spec", [ACTIVE, ALL], ids=["active", "retrieved"])
def test_rows_that_follow_from_their_tokens_answer_as_the_text_does(
    spec: dict[str, Any],
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
) -> None:
    """In a first turn behind its system message, in a later one behind all that was said."""
    worker = make_worker(ONE_LAYER, **LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", **spec)
    remembered = [cut_passage(earlier, *span) for span in SPANS]
    assert check_turns(worker, remembered, partial(continuation, ONE_LAYER)) == 0


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
    done = worker.turn(
        "s", messages, remembered=[cut_passage(earlier, start, stop, tokens)], max_tokens=8
    )
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


@pytest.mark.parametrize("spec", [ACTIVE, ALL], ids=["active", "retrieved"])
def test_a_passage_whose_pages_are_not_stored_is_prefilled(
    spec: dict[str, Any],
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
) -> None:
    """Pages that are lost, or were never there, as those of a session's last tokens."""
    worker = make_worker("llama", **LIMITS)
    _, tokens = say(worker, "earlier", words(160, seed=5))
    remembered = [
        pb.Passage(page_ids=ids, start=start, stop=stop, token_ids=tokens[start:stop])
        for (start, stop), ids in zip(SPANS, (2 * b"lost page of 16b", b""), strict=True)
    ]
    worker.open("s", **spec)
    assert check_turns(worker, remembered, partial(continuation, "llama")) == 100


def test_rows_and_text_stand_in_the_order_of_their_passages(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[[pb.TurnDone], list[int]],
) -> None:
    worker = make_worker(ONE_LAYER, **LIMITS)
    earlier, tokens = say(worker, "earlier", words(160, seed=5))
    spans = [(70, 130), (10, 50), (90, 100)]
    remembered = [cut_passage(earlier, *span) for span in spans]
    remembered[1].page_ids = b""
    seen = [token for start, stop in spans for token in tokens[start:stop]]
    worker.open("s", **ACTIVE)
    messages = [SYSTEM, {"role": "user", "content": words(20)}]
    done = worker.turn("s", messages, max_tokens=12, remembered=remembered)
    prompt, behind = list(done.token_ids[: done.prompt_tokens]), done.remembered.behind
    text = [*prompt[:behind], *seen, *prompt[behind:]]
    assert answer(done) == continuation(ONE_LAYER, text, 12)
    assert (done.remembered.tokens, done.remembered.prefilled_tokens) == (110, 40)


def test_passages_take_at_most_half_of_the_room_that_a_session_has_left(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The nearest, which come last; the answer has the rest."""
    worker = make_worker(max_session_tokens=400, **LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    remembered = [cut_passage(earlier, start, start + 60) for start in (0, 60, 120)]
    worker.open("s", **ACTIVE)
    done = worker.turn("s", words(70), remembered=remembered, max_tokens=1000)
    assert done.remembered.passages == 2
    assert done.output_tokens + done.prompt_tokens + done.remembered.tokens <= 400
    done = worker.turn("s", "north", remembered=remembered, generate=False)
    assert not done.HasField("remembered")


def test_a_session_without_recall_remembers_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    earlier, _ = say(worker, "earlier", words(160, seed=5))
    worker.open("s", budget=1024)
    done = worker.turn("s", words(20), remembered=[cut_passage(earlier, 10, 20)])
    assert (done.remembered.passages, done.remembered.tokens) == (0, 0)


@pytest.mark.parametrize(
    ("passage", "reason"),
    [
        (pb.Passage(page_ids=b"x" * ID_BYTES, start=0, stop=65), "is in 2 pages of 64, got 1"),
        (pb.Passage(start=9, stop=9), "is in 1 pages of 64, got 0"),
        (pb.Passage(start=0, stop=9, token_ids=[1]), "has 9, got 1"),
    ],
)
def test_a_passage_of_other_pages_or_tokens_than_its_own_is_refused(
    passage: pb.Passage, reason: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **ACTIVE)
    with pytest.raises(MalformedMessage, match=reason):
        worker.turn("s", words(20), remembered=[passage])


@pytest.mark.parametrize(
    ("kind", "prefilled"),
    [(RECURRENT["qwen3_next"], 0), (WINDOWED["gemma3_text"], 90)],
    ids=["recurrent", "windows"],
)
def test_a_model_with_other_layers_remembers_and_keeps_its_own(
    kind: Architecture, prefilled: int, tmp_path: Path
) -> None:
    """Layers with windows cannot see rows of others: such a model gets passages as text."""
    tokenizer = load_tokenizer(MODEL_PATH, (1,))
    settings = WorkerSettings(slots=2, max_budget=1024, block_tokens=32, recent=8)
    family = Family(kind, tokenizer, tmp_path, settings)
    worker = family.worker
    try:
        text = " ".join(f"river {number} lamp" for number in range(60))
        earlier, _ = say(worker, "earlier", text)
        worker.open("s", **ACTIVE)
        worker.open("told", **ACTIVE)
        for number in range(3):
            said = f"station {number} north " * 12
            remembered = [cut_passage(earlier, 10, 100)]
            done = worker.turn("s", said, generate=False, remembered=remembered)
            assert done.remembered.tokens == 90
            assert done.remembered.prefilled_tokens == prefilled
            worker.turn("told", said, generate=False)
        last = "copper market"
        assert worker.turn("s", last).token_ids == worker.turn("told", last).token_ids
    finally:
        family.close()
