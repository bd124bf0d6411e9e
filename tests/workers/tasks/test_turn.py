"""A turn says what the model would say, within its bounds, or changes nothing."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvrecall.domain.phases import Phase
from workers.errors import BadMessages, BadSettings, NotComparable, TurnTooLong, UnknownSession

FAMILIES = ("reference", "llama", "qwen2", "qwen3", "mistral")
BLOCKS = (1, 17, 128, 512)


@pytest.mark.parametrize("block_tokens", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_transformers_own(
    family: str,
    block_tokens: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=block_tokens)
    worker.open()
    done = worker.turn("s", words(150), max_tokens=32)
    assert answer(done) == continuation(family, done.token_ids[: done.prompt_tokens], 32)
    worker.check()


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_within_its_budget_changes_nothing(
    family: str,
    method: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=64)
    worker.open(method=method, repair_rows=100)
    done = worker.turn("s", words(150), repair=True)
    assert answer(done) == continuation(family, done.token_ids[: done.prompt_tokens], 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_turns_equal_one_long_context(
    family: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=32)
    worker.open()
    said: list[int] = []
    for number, max_tokens in enumerate((5, 24, 1, 9)):
        done = worker.turn("s", words(30, seed=number), max_tokens=max_tokens)
        prompt = [*said, *done.token_ids[: done.prompt_tokens]]
        assert answer(done) == continuation(family, prompt, max_tokens)
        said += done.token_ids
    assert worker.memory().length + len(done.state.pending) == len(said)


def test_a_truncated_answer_is_closed_before_the_next_turn(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    done = worker.turn("s", words(20), max_tokens=3)
    assert done.finish_reason == "length"
    assert done.output_tokens == 3
    assert list(done.token_ids)[-1] == worker.engine.tokenizer.eos_token_ids[0]
    assert list(done.state.pending)[-2:] == list(done.token_ids)[-2:]
    assert done.state.length + len(done.state.pending) == len(done.token_ids)


def test_every_token_of_a_turn_belongs_to_one_side(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    messages = [
        {"role": "user", "content": words(20)},
        {"role": "assistant", "content": words(10, seed=1)},
    ]
    appended = worker.turn("s", messages, generate=False)
    assert len(appended.utterance_tokens) == 2
    assert sum(appended.utterance_tokens) == len(appended.token_ids)
    done = worker.turn("s", [*messages, {"role": "user", "content": "and"}], max_tokens=5)
    assert len(done.utterance_tokens) == 4
    assert sum(done.utterance_tokens) == len(done.token_ids)
    assert done.utterance_tokens[-1] == done.output_tokens + 1, (
        "with the end of turn that closes a cut answer"
    )


def test_a_turn_may_append_without_generating(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    done = worker.turn("s", words(20), generate=False)
    assert done.finish_reason == "appended"
    assert not done.HasField("message")
    assert done.prompt_tokens == len(done.token_ids)
    assert done.memory.length + done.memory.unsettled == done.prompt_tokens


def test_appended_messages_count_like_generated_ones(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker()
    worker.open()
    messages = [
        {"role": "user", "content": words(20)},
        {"role": "assistant", "content": words(10, seed=1)},
    ]
    said = list(worker.turn("s", messages, generate=False).token_ids)
    done = worker.turn("s", words(15, seed=2))
    assert answer(done) == continuation("llama", [*said, *done.token_ids[: done.prompt_tokens]], 24)
    together = [*messages, {"role": "user", "content": words(15, seed=2)}]
    segments = worker.engine.tokenizer.prompt([], together, [], generate=True)
    assert [*said, *done.token_ids[: done.prompt_tokens]] == [
        t for s in segments for t in s.token_ids
    ]


@pytest.mark.parametrize("max_budget", [64, 10_000])
def test_a_turn_that_is_too_long_changes_nothing(
    max_budget: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[..., list[int]],
) -> None:
    """Past the slot for the method full, past the model's context for every method."""
    worker = make_worker(max_budget=max_budget, block_tokens=64)
    worker.open(budget=64)
    first = worker.turn("s", words(20), max_tokens=8)
    before = worker.memory()
    state = worker.engine.snapshot(worker.engine.session("s"))
    with pytest.raises(TurnTooLong, match="Send less, or open a new session"):
        worker.turn("s", words(2500))
    assert worker.memory() == before
    assert worker.engine.snapshot(worker.engine.session("s")) == state == first.state
    other = make_worker(max_budget=max_budget, block_tokens=64)
    other.open(budget=64)
    other.turn("s", words(20), max_tokens=8)
    assert answer(worker.turn("s", words(5), max_tokens=8)) == answer(
        other.turn("s", words(5), max_tokens=8)
    )


def test_max_tokens_is_limited_to_the_slots_room(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(max_budget=64, block_tokens=64)
    worker.open(budget=64)
    done = worker.turn("s", words(40), max_tokens=1000)
    assert done.prompt_tokens + done.output_tokens <= 128
    assert max(done.memory.peak_rows) <= 128
    with pytest.raises(TurnTooLong):
        worker.turn("s", "more")


@pytest.mark.parametrize(
    ("messages", "sampling", "error"),
    [
        ([], {}, BadMessages),
        ("hello", {"temperature": -1}, BadSettings),
        ("hello", {"top_p": 2}, BadSettings),
        ("hello", {"stop": [""]}, BadSettings),
        ("hello", {"compare_with": "s"}, NotComparable),
    ],
)
def test_a_refused_turn_changes_nothing(
    messages: Any, sampling: dict[str, Any], error: type[Exception], make_worker: Callable[..., Any]
) -> None:
    worker = make_worker()
    worker.open()
    worker.turn("s", "hello there", max_tokens=4)
    before = worker.memory()
    with pytest.raises(error):
        worker.turn("s", messages, **sampling)
    assert worker.memory() == before


def test_two_equal_sessions_have_no_divergence(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=16)
    recorded = [
        {"role": "user", "content": words(20)},
        {"role": "assistant", "content": words(40, seed=1)},
    ]
    worker.open("full")
    worker.turn("full", recorded, generate=False, keep_distribution=True)
    worker.open("other", method="snapkv", budget=1000)
    same = worker.turn("other", recorded, generate=False, compare_with="full").fidelity
    assert same.tokens == len(worker.engine.session("full").distribution.token_ids) > 40
    assert same.kl_mean == pytest.approx(0, abs=1e-5)
    assert same.top1_agreement == 1


def test_divergence_is_the_mean_kl_of_the_two_distributions(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Callable[..., Any]
) -> None:
    worker = make_worker(block_tokens=16, recent=4)
    recorded = [
        {"role": "user", "content": words(40)},
        {"role": "assistant", "content": words(30, seed=1)},
    ]
    worker.open("full")
    done = worker.turn("full", recorded, generate=False, keep_distribution=True)
    kept = worker.engine.session("full").distribution
    with torch.inference_mode():
        expected = plain("llama")(torch.tensor([list(done.token_ids)])).logits[0].log_softmax(-1)
    at = len(done.token_ids) - len(kept.token_ids)
    assert torch.allclose(kept.log_probs, expected[at - 1 : -1], atol=1e-4)
    worker.open("small", method="streaming_llm", budget=12)
    far = worker.turn(
        "small", recorded, generate=False, keep_distribution=True, compare_with="full"
    ).fidelity
    small = worker.engine.session("small").distribution.log_probs
    divergence = torch.nn.functional.kl_div(
        small, kept.log_probs, log_target=True, reduction="batchmean"
    )
    assert far.kl_mean == pytest.approx(float(divergence), rel=1e-4)
    assert far.top1_agreement == pytest.approx(
        float((small.argmax(-1) == kept.log_probs.argmax(-1)).float().mean())
    )


def test_different_recorded_text_cannot_be_compared(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open("a")
    worker.open("b")
    worker.turn(
        "a", [{"role": "assistant", "content": words(8)}], generate=False, keep_distribution=True
    )
    with pytest.raises(NotComparable):
        worker.turn(
            "b", [{"role": "assistant", "content": words(9)}], generate=False, compare_with="a"
        )


def test_phases_are_timed_and_text_is_streamed(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(method="snapkv", budget=200, repair_rows=50)
    assert "repair" not in worker.turn("s", words(400), repair=True).seconds
    worker.events["s"].clear()
    done = worker.turn("s", words(20, seed=1), repair=True)
    assert {"queued", "repair", "prefill", "first_token", "decode", "evict", "flush"} <= set(
        done.seconds
    )
    in_order = [phase for phase in Phase if phase in done.seconds]
    assert sorted(done.phase_starts, key=lambda each: done.phase_starts[each]) == in_order
    assert done.phase_starts["queued"] == 0.0
    for before, after in pairwise(in_order):
        ended = done.phase_starts[before] + done.seconds[before]
        assert done.phase_starts[after] == pytest.approx(ended)
    assert worker.shown().strip() == done.message.content
    assert [t for event in worker.events["s"] for t in event.token.ids][
        : done.output_tokens
    ] == list(done.token_ids[done.prompt_tokens :][: done.output_tokens])


def test_a_turn_on_rows_that_are_not_committed_is_refused_and_changes_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32)
    worker.open()
    done = worker.turn("s", words(40), length=0)
    for length in (0, done.state.length - 1, done.state.length + 1):
        with pytest.raises(UnknownSession, match="are committed; open it again"):
            worker.turn("s", words(5), length=length)
    assert worker.turn("s", words(5), length=done.state.length).state.length > done.state.length
