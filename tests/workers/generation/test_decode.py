"""Decoding samples, streams and ends; a script of tokens stands in for the scheduler."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvrecall.domain.messages import Sampling
from workers import methods
from workers.engine.session import SessionConfig, WorkerSession
from workers.generation.decode import Answer, Start, decode
from workers.generation.sampling import Sampler, sample
from workers.generation.steps import Decode
from workers.model.text_stream import ParsedAnswer, TextStream
from workers.model.tokenizer import ChatTokenizer


def make_session() -> WorkerSession:
    """A session without tokens, of the method full."""
    return WorkerSession.create(SessionConfig("s", 1, 50, 0, methods.build("full"), (50,)))


def make_start(tokenizer: ChatTokenizer, first: Tensor, sampling: Sampling) -> Start:
    """The start of an answer without a constraint."""
    stream = TextStream(tokenizer, sampling.stop)
    ends = (*tokenizer.eos_token_ids, *sampling.stop_token_ids)
    return Start(first, Sampler(sampling, ends=ends), stream, sampling.max_tokens, frozenset(ends))


def _run(
    tokenizer: ChatTokenizer, script: Sequence[int], sampling: Sampling
) -> tuple[Answer, list[int], list[tuple[int, str]], list[int]]:
    """Decode with a model that always prefers the script's next token."""
    session = make_session()
    shown: list[tuple[int, str]] = []
    first = torch.nn.functional.one_hot(torch.tensor(script[0]), 1280).float()
    running = decode(
        session,
        tokenizer,
        make_start(tokenizer, first, sampling),
        lambda emitted: shown.append((emitted.token, emitted.piece.text)),
    )
    said = []
    try:
        wanted = next(running)
        for token in script[1:]:
            assert isinstance(wanted, Decode)
            said.append(wanted.token)
            wanted = running.send(token)
    except StopIteration as finished:
        return finished.value, said, shown, session.pending
    raise AssertionError("decoding should have ended with the script")


def test_an_end_token_ends_the_answer_and_is_appended_with_the_next_turn(
    tokenizer: ChatTokenizer,
) -> None:
    words = tokenizer.encode("It is 42.")
    answer, said, shown, pending = _run(tokenizer, [*words, 1], Sampling())
    assert answer == Answer((*words, 1), "It is 42.", "stop", ParsedAnswer("It is 42.", "", ()))
    assert said == words
    assert pending == [1]
    assert "".join(text for _, text in shown) == "It is 42."
    assert [token for token, _ in shown] == words, "the end token has no text"


def test_the_limit_truncates_the_answer_and_closes_it(tokenizer: ChatTokenizer) -> None:
    words = tokenizer.encode("It is 42 and more")
    answer, said, _, pending = _run(tokenizer, words, Sampling(max_tokens=3))
    assert answer.token_ids == tuple(words[:3])
    assert answer.finish_reason == "length"
    assert said == words[:2]
    assert pending == [words[2], 1]


@pytest.mark.parametrize("stop", ["42", "is 4", " "])
def test_a_stop_string_ends_the_answer_before_it(stop: str, tokenizer: ChatTokenizer) -> None:
    words = tokenizer.encode("It is 42 and more")
    answer, said, shown, pending = _run(tokenizer, words, Sampling(stop=(stop,)))
    assert answer.finish_reason == "stop"
    assert answer.text == "".join(text for _, text in shown) == "It is 42 and more".split(stop)[0]
    kept = len(answer.token_ids) - 1
    assert list(answer.token_ids[:kept]) == said[:kept] == words[:kept]
    assert list(answer.token_ids) == [*words[:kept], pending[0]]
    assert tokenizer.decode([*words[:kept], *pending]) == answer.text + tokenizer.eos_texts[0]


def test_a_tool_call_is_in_the_answer_and_not_streamed(tokenizer: ChatTokenizer) -> None:
    text = 'Wait. <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    answer, _, shown, _ = _run(tokenizer, [*tokenizer.encode(text), 1], Sampling())
    assert answer.text == text
    assert "".join(piece for _, piece in shown) == "Wait. "


def test_sampling_follows_its_seed(tokenizer: ChatTokenizer) -> None:
    flat = torch.zeros(1280)
    answers = []
    for seed in (1, 1, 2):
        session = make_session()
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=seed)
        running = decode(session, tokenizer, make_start(tokenizer, flat, sampling), lambda _: None)
        try:
            wanted = next(running)
            while True:
                assert isinstance(wanted, Decode)
                wanted = running.send(sample(flat[None], [wanted.sampler])[0])
        except StopIteration as finished:
            answers.append(finished.value.token_ids)
    assert answers[0] == answers[1] != answers[2]
