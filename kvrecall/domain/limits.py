"""Limits and defaults of the service: one frozen value, passed as an argument."""

from dataclasses import asdict
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrecall.domain.messages import Sampling
from kvrecall.domain.worker_info import WorkerInfo


class ServiceLimits(BaseModel):
    """Limits and defaults that an operator may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default_budget: int | None = Field(
        default=None,
        ge=1,
        description="Active rows per KV head of a session that names no budget. Unset: all of its rows "
        "while they fit a slot, then an eighth of them, at least 1,024 and no more than a slot holds.",
    )
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that a turn may generate when it sets no max_tokens. Unset: up to the end "
        "of the context.",
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="Largest max_tokens of a turn. Unset: the context."
    )
    default_temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="Temperature of a turn that names none; 0: greedy. Unset: the model's, as those below.",
    )
    default_top_p: float | None = Field(
        default=None, gt=0, le=1, description="Nucleus sampling probability mass; 1: off."
    )
    default_top_k: int | None = Field(
        default=None, ge=0, lt=2**31, description="Number of likeliest tokens to sample; 0: off."
    )
    default_min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least probability to sample, as a share of the likeliest token's; 0: off.",
    )
    default_repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Divisor of the logits of tokens that the answer has already; 1: off.",
    )
    max_turn_messages: int = Field(
        default=512, ge=1, description="Largest number of messages in one turn."
    )
    max_turn_bytes: int = Field(
        default=1 << 20,
        ge=1,
        description="Largest size of all messages of one turn together, in UTF-8 bytes.",
    )
    max_result_bytes: int = Field(
        default=1 << 20,
        ge=1,
        description="Largest size of one tool result with its deltas, in UTF-8 bytes.",
    )
    max_output_pieces: int = Field(
        default=16_384,
        ge=1,
        description="Largest number of deltas that report the output of one tool call.",
    )
    delta_signal_bytes: int = Field(
        default=256,
        ge=1,
        description="UTF-8 bytes of new tool output after which a repair is conditioned on it; at least "
        "a quarter of the output before.",
    )
    pause_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="Timeout of a tool call, in seconds without an event.",
    )
    max_running_turns: int = Field(default=16, ge=1, description="Turns that run concurrently.")
    max_waiting_turns: int = Field(
        default=64, ge=0, description="Turns that may queue for a running slot."
    )
    max_running_creations: int = Field(
        default=64, ge=1, description="Sessions that are created concurrently."
    )
    max_waiting_creations: int = Field(
        default=256, ge=0, description="Creations that may queue for a running slot."
    )
    tenant_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the running and waiting turns, creations and streams that a lone tenant "
        "may hold; beside others each may hold as many as three times what is free, so a tenant that "
        "comes finds room. 1: all, whoever comes first.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description='Weights of tenants by name, as {"prod": 4}: how many times the share of one that '
        "is not named, in tokens and in places.",
    )
    max_waiting_writers: int = Field(
        default=8, ge=0, description="Requests that may queue for one session."
    )
    max_streams: int = Field(
        default=64,
        ge=1,
        description="Streams of events that may be open at a gateway at once: GET /v1/stream and those "
        "of sessions.",
    )
    queue_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Longest wait for a running slot or for a session, in seconds.",
    )
    claim_seconds: float = Field(
        default=3.0,
        gt=0,
        description="Lease duration, in seconds. A lease that is not renewed for this long expires.",
    )
    result_delay_seconds: float = Field(
        default=0.02,
        ge=0,
        description="Delay between a tool's result and the repair on it, in seconds: a turn may follow immediately.",
    )
    match_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Longest time that a turn waits for its episode match, in seconds.",
    )
    quarantine_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Time that a turn is refused after it has lost two workers, in seconds.",
    )
    retry_after_seconds: float = Field(
        default=1.0, gt=0, description="Retry-After of a refused request, in seconds."
    )
    notice_seconds: float = Field(
        default=1.0,
        ge=0,
        description="Time that a shutdown goes on taking requests while /readyz answers 503, in "
        "seconds: a load balancer's interval of probes.",
    )
    drain_seconds: float = Field(
        default=25.0,
        gt=0,
        description="Longest time of a shutdown, in seconds, notice and running turns included.",
    )
    idle_sessions: int = Field(
        default=10_000,
        ge=1,
        description="Idle sessions that a gateway keeps ready; one beyond them is opened again at "
        "its next use.",
    )
    sweep_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Interval between two searches of the workers for pages that no session has.",
    )
    unknown_page_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="Age at which such a page may be deleted, in seconds: the turn that wrote a younger "
        "one may not be committed yet.",
    )
    max_unknown_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Largest share of a worker's pages that are deleted because no session has them. If "
        "it is more, the catalog may have lost their sessions: nothing is deleted until a gateway starts "
        "with 1 here, or the catalog knows them again.",
    )
    max_unknown_pages: int = Field(
        default=1000,
        ge=0,
        description="Number of such pages that are deleted whatever their share: a killed gateway "
        "leaves those of the turns that it ran.",
    )
    tenant_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Token quota of one tenant over all its sessions; unset: unlimited.",
    )
    tenant_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Quota of one tenant in bytes of rows: its tokens, times the bytes that a token's "
        "rows take uncompressed. Unset: unlimited.",
    )
    tenant_catalog_bytes: int = Field(
        default=4 << 30,
        ge=1024,
        description="Quota of one tenant in bytes of the catalog: logs and states of its sessions, "
        "conversations, stored responses.",
    )
    tenant_sessions: int = Field(
        default=200_000,
        ge=1,
        description="Largest number of sessions of one tenant, forks included.",
    )
    response_days: float = Field(
        default=30.0, gt=0, description="Time that a stored response can be read again, in days."
    )
    tenant_conversations: int = Field(
        default=100_000,
        ge=1,
        description="Largest number of OpenAI's conversations of one tenant.",
    )
    max_conversation_items: int = Field(
        default=4096, ge=1, description="Largest number of items of one of these conversations."
    )
    max_conversation_bytes: int = Field(
        default=4 << 20,
        ge=1024,
        description="Largest size of one of these conversations, and of the conversation before a "
        "response that is read again, in UTF-8 bytes: what one request may read.",
    )
    kept_states: int = Field(
        default=16,
        ge=0,
        description="Last turns of a session at which a fork computes nothing; every 16th before "
        "is one, too. 0: a fork at an earlier turn computes all turns up to it.",
    )
    matched_seconds: float = Field(
        default=7 * 86_400.0,
        ge=60,
        description="Time without a turn after which a session that was begun by a stateless "
        "request is deleted, in seconds.",
    )
    damaged_history: Literal["repair", "refuse"] = Field(
        default="repair",
        description="What becomes of a client's history with images, audio, files, cut arguments, "
        "half an emoji, calls without results and results without calls: `repair` replaces them by "
        "words and says so in the header `kvrecall-ignored`, `refuse` answers with 400.",
    )
    max_metadata_bytes: int = Field(
        default=8192,
        ge=0,
        description="Largest size of a session's metadata, names and values together, in UTF-8 "
        "bytes.",
    )

    @property
    def mends(self) -> bool:
        """True if a damaged history is mended, False if it is refused."""
        return self.damaged_history == "repair"

    @model_validator(mode="after")
    def _defaults_are_allowed(self) -> Self:
        if self.cut_length(self.default_max_tokens or 1) < (self.default_max_tokens or 1):
            raise ValueError(
                f"default_max_tokens is over max_output_tokens, {self.max_output_tokens}"
            )
        return self

    def get_weight(self, tenant: str) -> float:
        """Return the weight of a tenant's work beside that of others."""
        return self.tenant_weights.get(tenant, 1.0)

    def cut_length(self, tokens: int) -> int:
        """Cut a number of tokens to what an answer may have."""
        return tokens if self.max_output_tokens is None else min(tokens, self.max_output_tokens)

    def build_sampling(self, info: WorkerInfo) -> Sampling:
        """Return the sampling of a turn that names nothing: the operator's values, else the model's."""
        model = asdict(info.sampling)
        length = self.default_max_tokens or self.cut_length(info.max_context)
        named = {name: getattr(self, f"default_{name}") for name in model}
        return Sampling(length, **model).with_named(**named)
