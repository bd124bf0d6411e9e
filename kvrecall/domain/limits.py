"""The limits and defaults of the service: one frozen value, passed as an argument."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ServiceLimits(BaseModel):
    """Everything about the service that an operator may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default_budget: int = Field(
        default=256, ge=1, description="Active rows per KV head where none are named."
    )
    default_repair_rows: int = Field(
        default=64, ge=0, description="Rows of the budget kept free for promotion."
    )
    default_method: str = Field(
        default="snapkv", description="Eviction method where none is named."
    )
    default_max_tokens: int = Field(
        default=256, ge=1, description="Tokens a turn may generate when it does not say."
    )
    max_output_tokens: int = Field(
        default=4096, ge=1, description="The most tokens that one turn may ask for."
    )
    max_turn_messages: int = Field(default=512, ge=1, description="Messages in one turn.")
    max_turn_bytes: int = Field(
        default=1 << 20, ge=1, description="UTF-8 bytes of all messages of one turn together."
    )
    max_result_bytes: int = Field(
        default=1 << 20, ge=1, description="UTF-8 bytes of one tool result with its deltas."
    )
    delta_signal_bytes: int = Field(
        default=256,
        ge=1,
        description="UTF-8 bytes of new tool output after which a repair is conditioned on it.",
    )
    pause_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="A tool call that nothing is heard of for so long is given up.",
    )
    max_running_turns: int = Field(
        default=16, ge=1, description="Turns handed to the worker at once."
    )
    max_waiting_turns: int = Field(
        default=64, ge=0, description="Turns that may wait for a place among the running."
    )
    max_waiting_writers: int = Field(
        default=8, ge=0, description="Requests that may wait for one session."
    )
    queue_seconds: float = Field(
        default=30.0, gt=0, description="The longest wait for a place or for a session."
    )
    claim_seconds: float = Field(
        default=3.0,
        gt=0,
        description="A process that is not heard of for so long works on a session no more.",
    )
    result_delay_seconds: float = Field(
        default=0.02,
        ge=0,
        description="From a tool's result to the repair on it: a turn may follow at once.",
    )
    match_seconds: float = Field(
        default=10.0, gt=0, description="The longest that a turn waits for its episode."
    )
    retry_after_seconds: float = Field(
        default=1.0, gt=0, description="Told to a client that was turned away."
    )
    drain_seconds: float = Field(
        default=30.0, gt=0, description="How long a stop waits for running turns."
    )
    tenant_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that one tenant's sessions may hold together; unset: any number.",
    )
    idempotency_records: int = Field(
        default=10_000, ge=1, description="Idempotency keys that are remembered."
    )

    @model_validator(mode="after")
    def _defaults_are_allowed(self) -> Self:
        if self.default_max_tokens > self.max_output_tokens:
            raise ValueError(
                f"default_max_tokens is over max_output_tokens, {self.max_output_tokens}"
            )
        return self
