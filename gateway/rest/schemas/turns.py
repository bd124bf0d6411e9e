"""Turns: the request with its sampling parameters, and the committed turn."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from gateway.rest.schemas.answers import AnswerOptions
from gateway.rest.schemas.base import MAX_SEED, Body, JsonObject, Name, StopStrings, View
from gateway.rest.schemas.memory import TurnMemoryView
from gateway.rest.schemas.messages import AssistantMessageView, MessageBody
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Sampling, TokenLogprob
from kvrecall.domain.reports import PrefillReport, ReselectionReport, RetrievalReport, TurnOutcome
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


class UsageView(View):
    """Token counts of a turn. `reasoning_tokens` are of the output."""

    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0


class AlternativeView(View):
    """Token that could have been in a place, its UTF-8 bytes and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class LogprobView(AlternativeView):
    """Token of the text with the likeliest ones in its place."""

    top: list[AlternativeView]


def view_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Build the log-probabilities of a text's tokens."""
    return [
        {**_view_token(each), "top": [_view_token(other) for other in each.top]}
        for each in logprobs
    ]


def _view_token(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.token,
        "bytes": list(logprob.utf8),
        "logprob": logprob.logprob,
    }


class FidelityView(View):
    """Divergence from the compared session, over recorded assistant tokens.

    `kl_mean` is the mean KL divergence in nats, `top1_agreement` the share of tokens with the same
    most likely next token.
    """

    tokens: int
    kl_mean: float
    top1_agreement: float


class TurnEpisodeView(View):
    """Episode that a turn was routed to, and the rows moved to make it active.

    Rows are counted over all layers and KV heads; none move when the episode was active already.
    `similarity` is the cosine of the turn's text and the episode.
    """

    episode: str
    similarity: float
    switched: bool
    rows_moved: int
    rows_kept: int
    bytes_moved: int
    seconds: float


class ReselectionsView(View):
    """Selections that an answer made while it was generated, over all layers and KV heads.

    `seconds` include what other sessions generated meanwhile.
    """

    count: int
    rows_in: int
    rows_out: int
    seconds: float

    @classmethod
    def from_domain(cls, report: ReselectionReport | None) -> "ReselectionsView | None":
        """Convert from the domain value; None for an answer without one."""
        return None if report is None else cls.model_validate(report)


class TurnPrefillView(View):
    """Blocks of a turn that were prefilled sparsely.

    `cover_min` and `cover_mean` are shares of attention weight that was computed, on the queries that
    checked it: the least of a layer and head, and the mean. `density` is the mean share of the rows
    that queries attended to.
    """

    blocks: int
    cover_min: float
    cover_mean: float
    density: float

    @classmethod
    def from_domain(cls, report: PrefillReport | None) -> "TurnPrefillView | None":
        """Convert from the domain value; None for a turn without sparse blocks."""
        return None if report is None else cls.model_validate(report)


class TurnRetrievalView(View):
    """What the steps of a turn retrieved from rows that were not active.

    `rows` are counted over all steps, layers and KV heads; `seconds` are of search and reading.
    `refused`: the worker had no memory to retrieve from, and the answer saw its active rows alone.
    """

    steps: int
    rows: int
    seconds: float
    refused: bool

    @classmethod
    def from_domain(cls, report: RetrievalReport | None) -> "TurnRetrievalView | None":
        """Convert from the domain value; None for a turn without retrieval."""
        return None if report is None else cls.model_validate(report)


class TurnView(View):
    """Committed turn. `message` is null when the turn was only appended.

    `seconds` are by phase of the turn. `durable`: the session's rows survive the loss of their
    worker; without it they are recomputed from the turn log after a loss.
    """

    session: str
    turn: int
    message: AssistantMessageView | None
    finish_reason: str
    usage: UsageView
    memory: TurnMemoryView
    seconds: dict[str, float]
    fidelity: FidelityView | None = None
    episode: TurnEpisodeView | None = None
    durable: bool
    logprobs: list[LogprobView] | None = None
    reselections: ReselectionsView | None = None
    prefill: TurnPrefillView | None = None
    retrieval: TurnRetrievalView | None = None

    @classmethod
    def from_domain(cls, outcome: TurnOutcome) -> "TurnView":
        """Convert from the domain value."""
        message = outcome.message
        fidelity = outcome.fidelity
        episode = outcome.episode
        return cls(
            session=outcome.session,
            turn=outcome.turn,
            message=None if message is None else AssistantMessageView.from_domain(message),
            finish_reason=outcome.finish_reason,
            usage=UsageView(
                prompt_tokens=outcome.prompt_tokens,
                output_tokens=outcome.output_tokens,
                reasoning_tokens=outcome.reasoning_tokens,
            ),
            memory=TurnMemoryView.from_domain(outcome),
            seconds=dict(outcome.seconds),
            fidelity=None if fidelity is None else FidelityView.model_validate(fidelity),
            episode=None if episode is None else TurnEpisodeView.model_validate(episode),
            durable=outcome.durable,
            logprobs=[LogprobView.model_validate(each) for each in view_logprobs(outcome.logprobs)]
            or None,
            reselections=ReselectionsView.from_domain(outcome.reselections),
            prefill=TurnPrefillView.from_domain(outcome.prefill),
            retrieval=TurnRetrievalView.from_domain(outcome.retrieval),
        )
