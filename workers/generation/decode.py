"""Decoding: stream and append. The scheduler forwards and samples all sessions in one batch."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import Tensor

from kvrecall.domain.messages import Sampling
from workers.engine.session import WorkerSession
from workers.generation.sampling import Sampler, sample
from workers.generation.steps import Decode
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Answer:
    """A generated answer as the session keeps it, up to a stop string; the reason of its end.

    All but the last token have rows. `finish_reason` is "stop" or "length"; `stop_sequence` is the
    stop string that it ended at, empty if there was none.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_sequence: str = ""


def decode(
    session: WorkerSession,
    tokenizer: ChatTokenizer,
    first: Tensor,
    sampling: Sampling,
    emit: Callable[[int, str], None],
) -> Generator[Decode, int, Answer]:
    """Generate until an end token, a stop string or the limit.

    `first` are the logits of the first token, float32 `[vocabulary]`. Yields each token to append
    and is sent the next one. `emit` gets every token with the text that it completes. The last
    token is not appended here: it becomes pending and opens the next turn's prefill, together with
    the end of turn if the model did not generate one.

    After a stop string the answer ends before it: the caller drops the rows of later tokens. Of a
    token that the stop string begins in, the text before it becomes pending.
    """
    sampler = Sampler(sampling)
    stream = TextStream(tokenizer, sampling.stop)
    token_ids: list[int] = []
    token = sample(first[None], [sampler])[0]
    while True:
        token_ids.append(token)
        if token in tokenizer.eos_token_ids:
            reason = "stop"
            session.pending = [token]
            break
        emit(token, stream.push(token))
        if stream.stopped:
            reason = "stop"
            kept, rest = stream.split_at_stop()
            session.pending = [*tokenizer.encode(rest), tokenizer.eos_token_ids[0]]
            token_ids = [*token_ids[:kept], session.pending[0]]
            break
        if len(token_ids) == sampling.max_tokens:
            reason = "length"
            session.pending = [token, tokenizer.eos_token_ids[0]]
            break
        token = yield Decode(token, sampler)
    if rest := stream.finish():
        emit(token, rest)
    return Answer(tuple(token_ids), stream.text, reason, stream.stop_sequence)
