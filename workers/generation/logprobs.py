"""Log-probabilities of generated tokens, with the tokens' text and bytes."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.generation.decode import Emitted
from workers.model.grammars import Grammars


def report_logprobs(grammars: Grammars, emitted: Emitted) -> list[pb.TokenLogprob]:
    """Report a token's log-probability and those of the likeliest in its place; none if not asked.

    A token that is a part of a character has its bytes, and the replacement character as text. The
    bytes of all tokens are the text: special tokens, which have none in it, are left out.
    """
    found = emitted.logprobs
    if found is None or grammars.vocabulary.is_special_token(emitted.token):
        return []
    top = [_report(grammars, token, logprob) for token, logprob in found.top]
    return [_report(grammars, emitted.token, found.logprob, top)]


def _report(
    grammars: Grammars, token: int, logprob: float, top: list[pb.TokenLogprob] | None = None
) -> pb.TokenLogprob:
    utf8 = grammars.vocabulary.decode_bytes([token])
    text = utf8.decode(errors="replace")
    return pb.TokenLogprob(token=text, utf8=utf8, logprob=logprob, top=top)
