"""The next prompt's beginning is computed while a tool runs, and the turn goes on behind it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from tests.workers.model.architectures.family import Family
from tests.workers.model.architectures.family import words as family_words
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from workers.errors import TurnTooLong, UnknownSession
from workers.model.tokenizer import load_tokenizer

BLOCK = 64
RECALLING: dict[str, Any] = {"method": "icecache", "budget": 56}
LIMITS: dict[str, Any] = {"block_tokens": BLOCK, "recent": 8}
SAID: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 5}
FAMILIES = ["llama", "qwen2", "reference"]

Said = Sequence[dict[str, Any]]


def result(text: str, call: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call, "name": "look"}


def ahead(worker: Any, name: str, messages: Said) -> int:
    """Compute the next prompt's beginning; returns its tokens that have rows."""
    said = [pb.Message(**message) for message in messages]
    request = pb.PrefillAheadRequest(session=name, epoch=1, messages=said)
    found: pb.PrefillAheadResult = worker.scheduler.prefill_ahead(request).result(600)
    return found.prompt_tokens


def settle(worker: Any, name: str) -> pb.SessionState:
    """Settle a session; returns what is committed of it."""
    settled: pb.SettleResult = worker.scheduler.settle(
        pb.SettleRequest(session=name, epoch=1)
    ).result(600)
    return settled.state


def begin(worker: Any, *names: str, **spec: Any) -> pb.TurnDone:
    """Open sessions with one turn, whose answer's rows are settled; returns the last one's."""
    for name in names:
        worker.open(name, **RECALLING | spec)
        done: pb.TurnDone = worker.turn(name, "where did Iver leave the keys? " * 9, **SAID)
        settle(worker, name)
    return done


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [{}, {"method": "full", "budget": 1024}], ids=["recall", "full"])
def test_a_turn_behind_what_was_computed_has_the_bits_of_one_that_computes_all(
    family: str, spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(family, **LIMITS)
    begin(worker, "ahead", "plain", **spec)
    text = words(260, seed=3)
    counts = [ahead(worker, "ahead", [result(text[: len(text) * part // 4])]) for part in (1, 2, 4)]
    assert 0 < counts[0] < counts[1] < counts[2]
    for turn, said in enumerate(([result(text)], "and now?")):
        done = {name: worker.turn(name, said, **SAID) for name in ("ahead", "plain")}
        assert done["ahead"].token_ids == done["plain"].token_ids
        assert done["ahead"].state.length == done["plain"].state.length
        assert done["ahead"].state.selection == done["plain"].state.selection
        saved = done["plain"].prefilled_tokens - done["ahead"].prefilled_tokens
        # The pending tokens of the turn before have rows as well.
        assert saved >= counts[2] if turn == 0 else saved == 0
    worker.check()


@pytest.mark.parametrize(
    "kind", [RECURRENT["qwen3_5_text"], RECURRENT["lfm2"], WINDOWED["gemma3_text"]]
)
def test_windows_and_recurrent_states_are_those_of_a_turn_that_computes_all(
    kind: Any, tmp_path: Path
) -> None:
    family = Family(kind, load_tokenizer(MODEL_PATH, (1,)), tmp_path)
    worker = family.worker
    text = family_words(120, 3)
    try:
        for name in ("ahead", "plain"):
            family.open(name)
            family.turn(name, family_words(40))
            settle(worker, name)
        assert (
            0
            < ahead(worker, "ahead", [result(text[:300])])
            < ahead(worker, "ahead", [result(text)])
        )
        for said in ([result(text)], "and now?"):
            done = {name: worker.turn(name, said, max_tokens=16) for name in ("ahead", "plain")}
            assert done["ahead"].token_ids == done["plain"].token_ids
            assert done["ahead"].state.length == done["plain"].state.length
        assert done["ahead"].prefilled_tokens == done["plain"].prefilled_tokens
    finally:
        family.close()


def test_results_that_are_known_before_the_last_one_are_computed_too(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    begin(worker, "ahead", "plain")
    said = [result(words(150, seed=1), "c1"), result(words(150, seed=2), "c2")]
    first = ahead(worker, "ahead", said[:1])
    assert ahead(worker, "ahead", [said[0], result(said[1]["content"][:700], "c2")]) > first > 0
    done = {name: worker.turn(name, said, **SAID) for name in ("ahead", "plain")}
    assert done["ahead"].token_ids == done["plain"].token_ids
    assert worker.metric("kvrecall_worker_ahead_tokens_total") > 0


@pytest.mark.parametrize(
    "turn",
    [
        lambda worker, text: worker.turn("s", [result("something else" + text)], **SAID),
        lambda worker, text: worker.turn("s", [result(text)], keep_distribution=True, **SAID),
        lambda worker, _: worker.repair("s", "Iver"),
        lambda worker, _: settle(worker, "s"),
    ],
    ids=["another result", "all logits", "repair", "settle"],
)
def test_what_needs_the_committed_session_has_it_opened_again(
    turn: Callable[[Any, str], Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    committed = begin(worker, "s", "plain", repair_rows=8)
    text = words(200)
    state = settle(worker, "s")
    assert ahead(worker, "s", [result(text)]) > 0
    with pytest.raises(UnknownSession, match="open it again"):
        turn(worker, text)
    worker.open("s", state=state, repair_rows=8, epoch=2, **RECALLING)
    again = worker.turn("s", [result("something else")], epoch=2, length=state.length, **SAID)
    assert again.token_ids == worker.turn("plain", [result("something else")], **SAID).token_ids
    assert committed.output_tokens
    worker.check()


def test_it_ends_behind_a_block_when_a_turn_comes(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    begin(worker, "s", "plain")
    text = words(900, seed=4)
    said = [pb.Message(**result(text))]
    running = worker.scheduler.prefill_ahead(
        pb.PrefillAheadRequest(session="s", epoch=1, messages=said)
    )
    worker.scheduler.stop_early("s").result(60)
    computed = running.result(60).prompt_tokens
    done = worker.turn("s", [result(text)], **SAID)
    assert computed < done.prompt_tokens - 2 * BLOCK
    assert done.token_ids == worker.turn("plain", [result(text)], **SAID).token_ids


def test_a_session_that_was_swapped_out_meanwhile_goes_on(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", slots=1, **LIMITS)
    begin(worker, "plain", "s")
    text = words(200, seed=6)
    assert ahead(worker, "s", [result(text)]) > 0
    expected = worker.turn("plain", [result(text)], **SAID)
    assert worker.engine.session("s").slot is None
    assert worker.turn("s", [result(text)], **SAID).token_ids == expected.token_ids


def test_nothing_is_computed_behind_the_end_of_a_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", max_budget=512, **LIMITS)
    begin(worker, "s", method="full", budget=512)
    text = words(900, seed=8)
    assert ahead(worker, "s", [result(text)]) > 0
    session = worker.engine.session("s")
    assert session.length <= worker.engine.bound(session)[0] < len(text) // 4
    with pytest.raises(TurnTooLong):
        worker.turn("s", [result(text)], **SAID)
    worker.check()


def test_too_little_text_for_a_block_changes_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    begin(worker, "s")
    before = worker.engine.snapshot(worker.engine.session("s"))
    assert ahead(worker, "s", [result("done")]) == 0
    assert worker.engine.snapshot(worker.engine.session("s")) == before


def test_a_cancelled_computation_has_the_session_opened_again(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    begin(worker, "s")
    said = [pb.Message(**result(words(900)))]
    running: Future[Any] = worker.scheduler.prefill_ahead(
        pb.PrefillAheadRequest(session="s", epoch=1, messages=said)
    )
    running.cancel()
    turn = worker.submit("s", [result("short")], **SAID)
    assert isinstance(turn.exception(60), UnknownSession | None)
