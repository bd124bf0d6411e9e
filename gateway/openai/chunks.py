"""Chat completions as clients read them: one object, or a stream of chunks."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.openai.chat_calls import CallDeltas, CallForm
from gateway.openai.errors import to_openai_error
from gateway.openai.logprobs import build_logprobs
from gateway.openai.schemas import StreamOptions
from kvrecall.domain.events import TurnFinished, TurnStarted
from kvrecall.domain.messages import TokenLogprob
from kvrecall.domain.reports import TurnOutcome
from services.conversations.choices import ChoiceProgress
from services.conversations.continuation import Continuation
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnPlanned,
    TurnProgress,
)
from services.usage import build_counts, build_receipt, count_tokens

Json = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What all objects of one answer have in common. `created` is in Unix seconds."""

    model: str
    fingerprint: str
    calls: CallForm
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def members(self, kind: str) -> Json:
        """Return the members of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "service_tier": "default",
        }


def build_completion(head: Head, outcome: TurnOutcome, found: Continuation) -> Json:
    """Build the object of a whole answer."""
    return build_completions(head, [outcome], [found])


def build_completions(
    head: Head, outcomes: Sequence[TurnOutcome], found: Sequence[Continuation]
) -> Json:
    """Build the object of several whole answers."""
    choices = [_build_choice(head, index, outcome) for index, outcome in enumerate(outcomes)]
    usage = build_usage(outcomes, found)
    return {**head.members("chat.completion"), "choices": choices, "usage": usage}


def _build_choice(head: Head, index: int, outcome: TurnOutcome) -> Json:
    message = outcome.generated
    calls = () if message is None else message.tool_calls
    text = "" if message is None else message.content
    answer: Json = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "refusal": None,
        **head.calls.build(calls),
    }
    if message is not None and message.reasoning:
        answer |= _to_reasoning(message.reasoning)
    return {
        "index": index,
        "message": answer,
        "logprobs": _to_logprobs(outcome.logprobs),
        "finish_reason": head.calls.get_finish(outcome.finish_reason),
    }


def build_usage(outcomes: Sequence[TurnOutcome], found: Sequence[Continuation]) -> Json:
    """Build the token counts: of the whole conversation, and of those what was not computed now.

    Of several answers the conversation counts once, as the first one's, and the output of all.
    """
    tokens = count_tokens(outcomes[0], found[0].appended_tokens)
    tokens = replace(tokens, output=sum(outcome.output_tokens for outcome in outcomes))
    details = {
        "cached_tokens": tokens.cached,
        "cache_write_tokens": tokens.written,
        "audio_tokens": 0,
    }
    return {
        **build_counts(tokens.prompt, tokens.output),
        "prompt_tokens_details": details,
        "completion_tokens_details": {
            "reasoning_tokens": sum(outcome.reasoning_tokens for outcome in outcomes),
            "audio_tokens": 0,
        },
        "kvrecall": build_receipt(outcomes[0]),
    }


class CompletionChunks:
    """The events of a streamed answer: `data:` lines, the last of them `[DONE]`.

    Of several answers each chunk has one's number. After an error the stream ends without
    `[DONE]`, by which clients know that it is incomplete.
    """

    def __init__(self, head: Head, found: Sequence[Continuation], options: StreamOptions) -> None:
        self._head = head
        self._found = found
        self._options = options
        self._prompts = {
            choice: _count_prompt(each.planned)
            for choice, each in enumerate(found)
            if each.planned is not None
        }
        self._tokens = [0] * len(found)
        self._calls = [CallDeltas(head.calls) for _ in found]
        self._outcomes: dict[int, TurnOutcome] = {}

    def begin(self) -> bytes:
        """Encode the chunks that name the role."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._delta(choice, role) for choice in range(len(self._found)))

    def encode(self, progress: TurnProgress | ChoiceProgress) -> bytes:
        """Encode a piece of progress, of the only answer or of one of several."""
        if isinstance(progress, ChoiceProgress):
            return self._encode_choice(progress.choice, progress.progress)
        return self._encode_choice(0, progress)

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error."""
        return _encode(to_openai_error(problem))

    def _encode_choice(self, choice: int, progress: TurnProgress) -> bytes:
        match progress:
            case TurnStarted():
                return b""
            case TurnPlanned():
                self._prompts[choice] = _count_prompt(progress)
                return b""
            case ReasoningDelta(text, tokens):
                self._tokens[choice] += tokens
                return self._delta(choice, _to_reasoning(text))
            case TextDelta(text, logprobs, tokens):
                self._tokens[choice] += tokens
                if not text and not logprobs:
                    return b""
                return self._delta(choice, {"content": text}, logprobs=_to_logprobs(logprobs))
            case ArgumentsDelta() | ToolCallEmitted():
                deltas = self._calls[choice].add(progress)
                return b"".join(self._delta(choice, delta) for delta in deltas)
            case TurnFinished(outcome):
                return self._end(choice, outcome)

    def _end(self, choice: int, outcome: TurnOutcome) -> bytes:
        """Encode the end of an answer, and after the last one's that of the stream."""
        self._tokens[choice] = outcome.output_tokens
        events = self._delta(choice, {}, self._head.calls.get_finish(outcome.finish_reason))
        self._outcomes[choice] = outcome
        if len(self._outcomes) < len(self._found):
            return events
        if self._options.include_usage:
            outcomes = [self._outcomes[each] for each in range(len(self._found))]
            usage = {"choices": [], "usage": build_usage(outcomes, self._found)}
            events += _encode({**self._head.members("chat.completion.chunk"), **usage})
        return events + b"data: [DONE]\n\n"

    def _delta(
        self,
        choice: int,
        delta: Json,
        finish_reason: str | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        one = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: Json = {**self._head.members("chat.completion.chunk"), "choices": [one]}
        if self._options.include_usage:
            chunk["usage"] = self._count(choice) if self._options.counts_on else None
        return _encode(chunk)

    def _count(self, choice: int) -> Json | None:
        """Return the counts of one answer so far; None until its prompt is counted."""
        prompt = self._prompts.get(choice)
        return None if prompt is None else build_counts(prompt, self._tokens[choice])


def _count_prompt(planned: TurnPlanned) -> int:
    return planned.held_tokens + planned.prompt_tokens


def _to_reasoning(text: str) -> Json:
    """Name the reasoning as DeepSeek and as vLLM do: clients read the one or the other."""
    return {"reasoning_content": text, "reasoning": text}


def _to_logprobs(logprobs: Sequence[TokenLogprob]) -> Json | None:
    return {"content": build_logprobs(logprobs), "refusal": None} if logprobs else None


def _encode(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
