"""Log-probabilities of tokens, generated ones and those of a prompt, with their text and bytes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.generation.decode import Emitted
from workers.generation.sampling import measure
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


class PromptScores:
    """The log-probabilities of a prompt's tokens, reported block by block as they are appended.

    Special tokens are reported by the text that stands for them.
    """

    def __init__(self, grammars: Grammars, first: int, most: int) -> None:
        """Begin with the first token, which has none. most: likeliest tokens to report in each place."""
        self._grammars = grammars
        self._most = most
        self.reported = [_report(grammars, first, math.nan)]

    def score(self, logits: Tensor, following: Sequence[int]) -> None:
        """Report the tokens that follow, from float logits `[t, vocabulary]` in front of them."""
        if not following:
            return
        tokens = torch.tensor(following, device=logits.device)
        for token, found in zip(following, measure(logits, tokens, self._most), strict=True):
            top = [_report(self._grammars, *each) for each in found.top]
            self.reported.append(_report(self._grammars, token, found.logprob, top))


def _report(
    grammars: Grammars, token: int, logprob: float, top: list[pb.TokenLogprob] | None = None
) -> pb.TokenLogprob:
    utf8 = grammars.vocabulary.decode_bytes([token])
    text = utf8.decode(errors="replace")
    return pb.TokenLogprob(token=text, utf8=utf8, logprob=logprob, top=top)
