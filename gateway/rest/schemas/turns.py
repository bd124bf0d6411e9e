"""Turns: the request with its sampling parameters, and the committed turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ConfigDict, Field

from gateway.rest.schemas.answers import AnswerOptions
from gateway.rest.schemas.base import MAX_SEED, Body, JsonObject, Name, StopStrings
from gateway.rest.schemas.memory import to_turn_memory
from gateway.rest.schemas.messages import AssistantMessage, MessageBody, to_assistant_message
from gateway.rest.schemas.public import copy_optional, copy_to
from kvrecall import client
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Sampling, TokenLogprob
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.turn_request import TurnRequest


class LogprobsBody(Body):
    """Next-token distributions: save this turn's, or compare with those another session saved."""

    save: bool = Field(
        default=False, description="Save the distributions of this turn for a later comparison."
    )
    compare_with: Name | None = Field(
        default=None,
        description="Session that saved the distributions of the same turn. The result is the "
        "`fidelity` of the response.",
    )
    top: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log-probability of each token of the text, and of so many of the "
        "likeliest in its place.",
    )


class TurnBody(AnswerOptions, Body):
    """New messages of a conversation, the sampling parameters and options of the turn."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 60},
            ]
        }
    )

    messages: list[MessageBody] = Field(
        default=[],
        description="New messages only; may be empty when tool results are waiting to be appended.",
    )
    generate: bool = Field(
        default=True,
        description="False: append the messages without generating a reply; the finish reason "
        "is `appended`.",
    )
    stream: bool = Field(
        default=False,
        description="Respond with server-sent events: reasoning, token, tool_call, done, error.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="Maximum number of generated tokens; null: the service's default.",
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="Sampling temperature; under 0.00001: greedy decoding; null: the model's default, "
        "as of those below.",
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Nucleus sampling probability mass; 1: off."
    )
    top_k: int | None = Field(
        default=None, ge=0, lt=2**31, description="Sample from the k most likely tokens; 0: off."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="Sampling seed; null: derived from the session's seed and the turn's number.",
    )
    stop: StopStrings = Field(default=[], description="Strings that end the generation.")
    queue: bool = Field(
        default=False,
        description="Wait (for a bounded time) while another turn of the session runs.",
    )
    repair: bool | None = Field(
        default=None,
        description="Repair on these messages before they are prefilled; null: if the session's "
        "repair_on has turn and something is predicted.",
    )
    wait_for_repairs: bool = Field(
        default=False,
        description="Wait for pending repairs to finish; false: stop them early and use their "
        "partial result.",
    )
    logprobs: LogprobsBody = LogprobsBody()
    response_format: JsonObject | None = Field(
        default=None,
        description='Form of the text: {"type": "text"}, {"type": "json_object"} or {"type": '
        '"json_schema", "json_schema": {"schema": ..., "strict": ...}}.',
    )

    def to_domain(self, default: Sampling) -> TurnRequest:
        """Convert to the domain value, with what is not named from `default`."""
        return TurnRequest(
            messages=tuple(message.to_domain() for message in self.messages),
            generate=self.generate,
            sampling=self._sampling_to_domain(default),
            seed=self.seed,
            queue=self.queue,
            keep_distribution=self.logprobs.save,
            compare_with=self.logprobs.compare_with or "",
            repair=self.repair,
            wait_for_repairs=self.wait_for_repairs,
        )

    def _sampling_to_domain(self, default: Sampling) -> Sampling:
        sampling = default.with_named(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
            top_logprobs=self.logprobs.top,
        )
        return self.constrain(sampling, self.response_format)


@dataclass(frozen=True)
class Turn(client.Turn):
    """Committed turn. `message` is null when the turn was only appended.

    `seconds` are by phase of the turn. `durable`: the session's rows survive the loss of their
    worker; without it they are recomputed from the turn log after a loss.
    """

    # The client reads both forms of a message as one, and null as an empty list.
    message: AssistantMessage | None  # type: ignore[assignment]
    logprobs: tuple[client.TokenLogprob, ...] | None = None  # type: ignore[assignment]


def to_logprobs(logprobs: Sequence[TokenLogprob]) -> tuple[client.TokenLogprob, ...]:
    """Convert the log-probabilities of a text's tokens."""
    return tuple(
        client.TokenLogprob(
            each.token,
            tuple(each.utf8),
            each.logprob,
            tuple(
                client.Alternative(other.token, tuple(other.utf8), other.logprob)
                for other in each.top
            ),
        )
        for each in logprobs
    )


def to_turn(outcome: TurnOutcome) -> Turn:
    """Convert a committed turn."""
    return copy_to(
        Turn,
        outcome,
        message=to_assistant_message(outcome.message),
        usage=copy_to(client.Usage, outcome),
        memory=to_turn_memory(outcome),
        fidelity=copy_optional(client.Fidelity, outcome.fidelity),
        episode=copy_optional(client.TurnEpisode, outcome.episode),
        logprobs=to_logprobs(outcome.logprobs) or None,
        reselections=copy_optional(client.Reselections, outcome.reselections),
        prefill=copy_optional(client.TurnPrefill, outcome.prefill),
        retrieval=copy_optional(client.TurnRetrieval, outcome.retrieval),
        remembered=copy_optional(client.TurnRemembered, outcome.remembered),
    )
