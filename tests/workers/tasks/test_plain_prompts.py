"""Prompts that are given as tokens: no template, and the log-probabilities of transformers' model."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import BadMessages


def submit(worker: Any, prompt: list[int], **options: Any) -> "Future[pb.TurnDone]":
    """Run a turn of a plain prompt in a new session."""
    worker.open("s")
    events: list[pb.TurnEvent] = []
    worker.events["s"] = events
    generate = options.pop("generate", True)
    request = pb.TurnRequest(
        session="s",
        epoch=1,
        prompt=prompt,
        generate=generate,
        sampling=pb.Sampling(**{"max_tokens": 12, **options}),
    )
    done: Future[pb.TurnDone] = worker.scheduler.turn(request, events.append)
    return done


def complete(worker: Any, prompt: list[int], **options: Any) -> pb.TurnDone:
    """Run a turn of a plain prompt to its end."""
    return submit(worker, prompt, **options).result(600)


def test_a_plain_prompt_is_continued_as_it_stands(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker("qwen3", block_tokens=16)
    prompt = worker.engine.tokenizer.encode(words(40))
    done = complete(worker, prompt)
    assert list(done.token_ids[: done.prompt_tokens]) == prompt
    assert answer(done) == continuation("qwen3", prompt, 12)
    assert worker.shown() == done.message.content
    assert done.message.content == worker.engine.tokenizer.decode(answer(done))
    worker.check()


@pytest.mark.parametrize("generate", [False, True])
def test_the_prompt_is_scored_as_by_transformers(
    generate: bool,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    plain: Callable[..., Any],
) -> None:
    worker = make_worker("qwen3", block_tokens=16)
    prompt = worker.engine.tokenizer.encode(words(40))
    done = complete(worker, prompt, generate=generate, prompt_logprobs=3)
    with torch.no_grad():
        expected = plain("qwen3")(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    first, *scored = done.prompt_logprobs
    assert math.isnan(first.logprob)
    wanted = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=False)]
    assert [each.logprob for each in scored] == pytest.approx(wanted, abs=1e-3)
    best = expected[:-1].topk(3).values.tolist()
    found = [[other.logprob for other in each.top] for each in scored]
    assert all(one == pytest.approx(two, abs=1e-3) for one, two in zip(found, best, strict=True))
    texts = b"".join(each.utf8 for each in done.prompt_logprobs)
    assert texts.decode() == worker.engine.tokenizer.decode(prompt)
    assert done.output_tokens == (12 if generate else 0)


def test_a_special_token_of_a_prompt_has_its_text(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    tokenizer = worker.engine.tokenizer
    prompt = [tokenizer.eos_token_ids[0], *tokenizer.encode("It is 42.")]
    done = complete(worker, prompt, prompt_logprobs=0)
    assert done.prompt_logprobs[0].token == tokenizer.eos_texts[0]


def test_a_token_that_the_model_has_not_is_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    with pytest.raises(BadMessages, match="has token 99999999; the model has tokens 0 to"):
        complete(worker, [5, 99_999_999])


def test_a_named_token_ends_the_answer_and_the_end_of_turn_is_added(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    worker = make_worker("qwen3")
    prompt = worker.engine.tokenizer.encode(words(40))
    whole = answer(complete(worker, prompt))
    stop = next(token for token in whole[3:] if whole.index(token) > 2)
    done = complete(worker, prompt, stop_token_ids=[stop])
    at = whole.index(stop)
    assert (done.finish_reason, answer(done)) == ("stop", whole[: at + 1])
    assert done.message.content == worker.engine.tokenizer.decode(whole[:at])
    assert list(done.state.pending)[-2:] == [stop, worker.engine.tokenizer.eos_token_ids[0]]
    longer = complete(worker, prompt, stop_token_ids=[stop], min_tokens=at + 3)
    assert longer.output_tokens >= at + 3
    assert stop not in answer(longer)[: at + 3]
    worker.check()


def test_an_answer_goes_on_from_its_opening(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker("qwen3", block_tokens=16)
    tokenizer = worker.engine.tokenizer
    asked = [{"role": "user", "content": words(12)}]
    opening = words(5, seed=3)
    rendered = tokenizer.inner.apply_chat_template(
        [*asked, {"role": "assistant", "content": opening}],
        continue_final_message=True,
        tokenize=False,
    )
    prompt = tokenizer.encode(rendered)
    worker.open("s")
    request = pb.TurnRequest(
        session="s",
        epoch=1,
        messages=[pb.Message(role="user", content=asked[0]["content"])],
        generate=True,
        opening=opening,
        sampling=pb.Sampling(max_tokens=12),
    )
    events: list[pb.TurnEvent] = []
    done = worker.scheduler.turn(request, events.append).result(600)
    assert list(done.token_ids[: done.prompt_tokens]) == prompt
    assert answer(done) == continuation("qwen3", prompt, 12)
    shown = "".join(event.token.text for event in events)
    assert done.message.content == opening + shown
    assert done.state.recent[-1].content == done.message.content
    worker.check()
