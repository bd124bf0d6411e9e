"""Completions as clients read them: one object, or a stream of chunks."""

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.openai.errors import to_openai_error
from gateway.openai.schemas import StreamOptions
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import TokenLogprob
from kvrecall.domain.reports import TurnOutcome
from services.conversations.choices import ChoiceProgress
from services.streams.turn import TextDelta, TurnProgress
from services.usage import build_counts

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What all objects of one request have in common.

    - `prompts`: the tokens of each prompt; `choices`: answers to each, one after the other.
    - `echoed`: the text of each prompt, which its answers begin with; empty without echo.
    - `created`: Unix seconds.
    """

    model: str
    fingerprint: str
    prompts: Sequence[Sequence[int]]
    choices: int
    echoed: Sequence[str] = ()
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def members(self) -> Json:
        """Return the members of every object."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def get_opening(self, choice: int) -> str:
        """Return what the text of an answer begins with."""
        return self.echoed[choice // self.choices] if self.echoed else ""

    def build_usage(self, outcomes: Sequence[TurnOutcome]) -> Json:
        """Build the token counts; a prompt with several answers counts once."""
        output = sum(outcome.output_tokens for outcome in outcomes)
        return build_counts(sum(map(len, self.prompts)), output)

    def count(self, choice: int, output: int) -> Json:
        """Build the token counts of one answer, which has `output` tokens."""
        return build_counts(len(self.prompts[choice // self.choices]), output)


def build_completion(asked: Asked, outcomes: Sequence[TurnOutcome]) -> Json:
    """Build the object of all answers."""
    choices = [_build_choice(asked, index, outcome) for index, outcome in enumerate(outcomes)]
    return {**asked.members(), "choices": choices, "usage": asked.build_usage(outcomes)}


class TextChunks:
    """The events of streamed answers: `data:` lines, the last of them `[DONE]`.

    After an error the stream ends without `[DONE]`, by which clients know that it is incomplete.
    """

    def __init__(self, asked: Asked, options: StreamOptions) -> None:
        self._asked = asked
        self._options = options
        self._places: dict[int, int] = {}
        self._tokens: Counter[int] = Counter()
        self._outcomes: list[TurnOutcome] = []

    def begin(self) -> bytes:
        """Encode the prompts, as far as they are part of the texts."""
        openings = [(index, self._asked.get_opening(index)) for index in range(self._count)]
        return b"".join(self._chunk(index, text) for index, text in openings if text)

    def encode(self, progress: ChoiceProgress) -> bytes:
        """Encode a piece of progress of one of the answers."""
        return self._encode_choice(progress.choice, progress.progress)

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error."""
        return _encode(to_openai_error(problem))

    @property
    def _count(self) -> int:
        return len(self._asked.prompts) * self._asked.choices

    def _encode_choice(self, choice: int, progress: TurnProgress) -> bytes:
        match progress:
            case TextDelta(text, logprobs, tokens):
                self._tokens[choice] += tokens
                if not text and not logprobs:
                    return b""
                offset = self._places.get(choice, len(self._asked.get_opening(choice)))
                self._places[choice] = offset + len(text)
                return self._chunk(choice, text, _build_logprobs(logprobs, offset))
            case TurnFinished(outcome):
                return self._end(choice, outcome)
            case _:
                return b""

    def _end(self, choice: int, outcome: TurnOutcome) -> bytes:
        """Encode the end of an answer, and after the last one's that of the stream."""
        self._tokens[choice] = outcome.output_tokens
        events = self._chunk(choice, "", finish_reason=_to_finish(outcome))
        self._outcomes.append(outcome)
        if len(self._outcomes) < self._count:
            return events
        if self._options.include_usage:
            usage = self._asked.build_usage(self._outcomes)
            events += _encode({**self._asked.members(), "choices": [], "usage": usage})
        return events + b"data: [DONE]\n\n"

    def _chunk(
        self,
        choice: int,
        text: str,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        one = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._asked.members(), "choices": [one]}
        if self._options.include_usage:
            counts_on = self._options.counts_on
            chunk["usage"] = self._asked.count(choice, self._tokens[choice]) if counts_on else None
        return _encode(chunk)


def _build_choice(asked: Asked, index: int, outcome: TurnOutcome) -> Json:
    opening = asked.get_opening(index)
    text = "" if outcome.message is None else outcome.message.content
    prompt = outcome.prompt_logprobs
    # Special tokens in front of a text, which are none of it, come before its first character.
    start = len(opening) - sum(len(each.token) for each in prompt)
    return {
        "index": index,
        "text": opening + text,
        "logprobs": _build_logprobs((*prompt, *outcome.logprobs), start),
        "finish_reason": _to_finish(outcome),
    }


def _build_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Json | None:
    """Build parallel lists of tokens, with the place of each in the text. None if there are none.

    The first token of a prompt has no log-probability, which is null.
    """
    if not logprobs:
        return None
    offsets = []
    for each in logprobs:
        offsets.append(max(0, offset))
        offset += len(each.token)
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [_to_number(each) for each in logprobs],
        "top_logprobs": [_to_alternatives(each) for each in logprobs],
        "text_offset": offsets,
    }


def _to_number(logprob: TokenLogprob) -> float | None:
    return None if math.isnan(logprob.logprob) else logprob.logprob


def _to_alternatives(logprob: TokenLogprob) -> Json | None:
    """Return the likeliest tokens in a place, and the one that is there; the likeliest of each text."""
    if math.isnan(logprob.logprob):
        return None
    found: Json = {}
    for each in (*logprob.top, logprob):
        found.setdefault(each.token, each.logprob)
    return found


def _to_finish(outcome: TurnOutcome) -> str:
    """Return why the answer ended; one of no tokens has reached its length."""
    return "length" if outcome.finish_reason == "appended" else outcome.finish_reason


def _encode(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
