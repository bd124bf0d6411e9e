"""Decoding: choose, show, say; the scheduler runs the forward pass for all sessions that decode at once."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import Tensor

from workers.engine.session import WorkerSession
from workers.generation.sampling import Sampler, SamplingSettings
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class NextLogits:
    """Logits float32 `[vocabulary]` of one session's next token, and where their maximum is."""

    row: Tensor
    best: int


@dataclass(frozen=True)
class Answer:
    """What was generated: every token id, the text up to a stop string, why it ended (stop, length)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def decode(
    session: WorkerSession,
    tokenizer: ChatTokenizer,
    first: NextLogits,
    sampling: SamplingSettings,
    show: Callable[[int, str], None],
) -> Generator[int, NextLogits, Answer]:
    """Generate until an end token, a stop string or the limit; yields a token to say and is sent its logits.

    `show` gets every token with the text that it completes. The last token is never said here: it becomes pending
    and opens the next turn's prefill, together with the end of turn where the model did not come to say it.
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
        show(token, stream.push(token))
        if stream.stopped or len(token_ids) == sampling.max_tokens:
            reason = "stop" if stream.stopped else "length"
            session.pending = [token, tokenizer.eos_token_ids[0]]
            break
        logits = yield token
    if rest := stream.finish():
        show(token, rest)
    return Answer(tuple(token_ids), stream.text, reason)
