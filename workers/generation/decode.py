"""Decoding: sample, stream, append. The scheduler forwards all decoding sessions in one batch."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvrecall.domain.messages import Sampling
from workers.engine.session import WorkerSession
from workers.generation.sampling import Sampler
from workers.generation.steps import NextLogits
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Answer:
    """A generated answer: every token id, the text up to a stop string, the reason of its end.

    `finish_reason` is "stop" or "length".
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def decode(
    session: WorkerSession,
    tokenizer: ChatTokenizer,
    first: NextLogits,
    sampling: Sampling,
    emit: Callable[[int, str], None],
) -> Generator[int, NextLogits, Answer]:
    """Generate until an end token, a stop string or the limit.

    Yields each token to append and is sent the logits after it. `emit` gets every token with the
    text that it completes. The last token is not appended here: it becomes pending and opens the
    next turn's prefill, together with the end of turn if the model did not generate one.
    """
    sampler = Sampler(sampling)
    stream = TextStream(tokenizer, sampling.stop)
    token_ids: list[int] = []
    logits = first
    while True:
        token = sampler.next_token(logits.row, logits.best)
        token_ids.append(token)
        if token in tokenizer.eos_token_ids:
            reason = "stop"
            session.pending = [token]
            break
        emit(token, stream.push(token))
        if stream.stopped or len(token_ids) == sampling.max_tokens:
            reason = "stop" if stream.stopped else "length"
            session.pending = [token, tokenizer.eos_token_ids[0]]
            break
        logits = yield token
    if rest := stream.finish():
        emit(token, rest)
    return Answer(tuple(token_ids), stream.text, reason)
