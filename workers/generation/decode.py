"""Decoding: stream and append. The scheduler forwards and samples all sessions in one batch."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workers.engine.session import WorkerSession
from workers.generation.sampling import Logprobs, Sampler, sample
from workers.generation.steps import Decode, Steps
from workers.model.text_stream import ParsedAnswer, Piece, TextStream
from workers.model.tokenizer import ChatTokenizer
from workers.parallel.alone import Alone
from workers.parallel.group import Group


@dataclass(frozen=True)
class Answer:
    """A generated answer as the session keeps it, up to a stop string; the reason of its end.

    All but the last token have rows. `text` has the marks of its parts, which are `parsed`.
    `finish_reason` is "stop" or "length"; `stop_sequence` is the stop string that it ended at,
    empty if there was none.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    parsed: ParsedAnswer
    reasoning_tokens: int = 0
    stop_sequence: str = ""


@dataclass(frozen=True)
class Start:
    """The start of an answer: logits of its first token, float32 `[vocabulary]`, and its limits.

    `ends`: tokens that end it: the model's ends of a turn, and those that the client names.
    """

    logits: Tensor
    sampler: Sampler
    stream: TextStream
    max_tokens: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Emitted:
    """A token of the answer, what it completes, and its log-probability where it is reported."""

    token: int
    piece: Piece
    logprobs: Logprobs | None = None


def decode(
    session: WorkerSession,
    tokenizer: ChatTokenizer,
    start: Start,
    emit: Callable[[Emitted], None],
    between: Callable[[int], Steps[None]] | None = None,
    group: Group = Alone(),
) -> Steps[Answer]:
    """Generate until an end token, a stop string or the limit.

    Yields each token to append and is sent the next one; `between` runs before each, with the
    number of the answer's tokens that are appended already. `emit` gets every token with the text that
    it completes. The last token is not appended here: it becomes pending and opens the next turn's
    prefill, together with the end of turn if the model did not generate one.

    After a stop string the answer ends before it: the caller drops the rows of later tokens. Of a
    token that the stop string begins in, the text before it becomes pending. Raises BadSettings
    where the answer's grammar fails. group: of ranks that all decode it; rank 0 samples.
    """
    stream, sampler = start.stream, start.sampler
    closing = tokenizer.keep_end(tokenizer.eos_token_ids[0])
    token_ids: list[int] = []
    reasoning_tokens = 0
    [token] = group.lead(sample(start.logits[None], [sampler]))
    while True:
        token_ids.append(token)
        if token in start.ends:
            sampler.finish()
            reason = "stop"
            closed = token in tokenizer.eos_token_ids
            token_ids[-1] = tokenizer.keep_end(token)
            session.pending = [token_ids[-1], *(() if closed else (closing,))]
            break
        in_reasoning = stream.reasoning
        piece = stream.push(token)
        reasoning_tokens += bool(in_reasoning or stream.reasoning)
        emit(Emitted(token, piece, sampler.logprobs if stream.in_text else None))
        if stream.stopped:
            reason = "stop"
            kept, rest = stream.split_at_stop()
            session.pending = [*tokenizer.encode(rest), closing]
            token_ids = [*token_ids[:kept], session.pending[0]]
            break
        if len(token_ids) == start.max_tokens:
            reason = "length"
            session.pending = [token, closing]
            break
        sampler.accept(token)
        if between is not None:
            yield from between(len(token_ids) - 1)
        token = yield Decode(token, sampler)
    for held in stream.finish():
        emit(Emitted(token, held))
    parsed = stream.parse()
    stopped_at = stream.stop_sequence
    return Answer(tuple(token_ids), stream.raw, reason, parsed, reasoning_tokens, stopped_at)
