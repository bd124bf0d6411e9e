"""Log-probabilities of an answer's tokens as OpenAI's APIs show them."""

from collections.abc import Sequence
from typing import Any

from kvrecall.domain.messages import TokenLogprob

Json = dict[str, Any]


def build_logprobs(logprobs: Sequence[TokenLogprob]) -> list[Json]:
    """Build the entries of tokens, each with the likeliest ones in its place."""
    return [
        _build(each) | {"top_logprobs": [_build(other) for other in each.top]} for each in logprobs
    ]


def _build(logprob: TokenLogprob) -> Json:
    return {"token": logprob.token, "logprob": logprob.logprob, "bytes": list(logprob.utf8)}
