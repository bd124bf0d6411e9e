"""Settings of one worker."""

from pydantic import BaseModel, ConfigDict, Field


class WorkerSettings(BaseModel):
    """Limits and defaults of one worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: int = Field(
        default=4, ge=1, description="sessions whose active rows are in memory at once"
    )
    max_budget: int = Field(
        default=4096,
        ge=1,
        description="largest budget of a session, rows per KV head and layer: what a slot holds",
    )
    template_seconds: float = Field(
        default=30.0,
        gt=0,
        description="seconds that rendering and encoding the messages of one turn may take: of a chat "
        "template with loops in loops",
    )
    max_session_tokens: int | None = Field(
        default=None,
        ge=1,
        description="most tokens of a session; by default those with recall have no end, and all others end "
        "with the model's context",
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=64,
        multiple_of=64,
        description="tokens of a chunk of positions behind the model's window, at most a third of it; by default "
        "a sixth. Old rows are seen from one to three chunks away. Rows of other chunks are "
        "another model's: pages that were written with other ones are refused",
    )
    block_tokens: int = Field(default=256, ge=1, description="new tokens prefilled in one step")
    prompt_tokens: int = Field(
        default=256,
        ge=1,
        description="most tokens that evictions and builds run over the active rows at once; a longer "
        "prompt runs in pieces",
    )
    episode_tokens: int = Field(
        default=2048,
        ge=1,
        description="most tokens of an episode's patched prompt that evictions and builds observe; of "
        "a longer one, the last",
    )
    signal_tokens: int = Field(
        default=8192,
        ge=1,
        description="most tokens of a signal that a repair observes; of a longer one, the last",
    )
    sinks: int = Field(default=4, ge=0, description="first rows of a session, never evicted")
    recent: int = Field(default=32, ge=0, description="newest rows, never evicted")
    turn_share: float = Field(
        default=0.5, ge=0, le=1, description="share of the budget that a turn's own rows may hold"
    )
    embedder: str = Field(
        default="", description="sentence-transformers model, path or hub name; empty: packaged"
    )
    native_attention: bool = Field(
        default=True,
        description="answers are computed by native code, where it was built for this CPU and covers the "
        "model; off: by torch, to the same results in two to four times the time, without a copy of "
        "weights in bfloat16",
    )
    device_codes_bytes: int = Field(
        default=0,
        ge=0,
        description="most memory of the GPU for codes of stored keys, with which it searches the rows itself. They "
        "take an eighth to a quarter of the rows' bytes; sessions beyond the limit are searched on the host. 0, "
        "the default: all are, since no GPU has run the kernels yet",
    )
    step_graphs: int = Field(
        default=0,
        ge=0,
        description="most CUDA graphs of decode steps, one for each batch's shapes. 0, the default: none, since no "
        "GPU has run them yet",
    )
    idle_seconds: float = Field(
        default=900.0,
        gt=0,
        description="time without a request after which a session is released from memory; its "
        "next request opens it again",
    )
    idle_bytes: int = Field(
        default=1 << 29,
        ge=0,
        description="most bytes of memory of open sessions, slots and stored rows aside; above it "
        "the longest idle ones are released after 10 seconds without a request",
    )
    measure_seconds: float = Field(
        default=45.0,
        gt=0,
        description="longest wait of a session's opening for the measurement of the layers' "
        "sensitivity, if its layer budgets need it; after that it is refused as overloaded, and the "
        "measurement goes on. Less than KVRECALL_WIRE__OPEN_SECONDS",
    )
    max_jobs: int = Field(
        default=64, ge=1, description="turns and repairs that may wait or run at once"
    )

    @property
    def min_budget(self) -> int:
        """The least budget, beside the reserve for repair, that leaves a row to choose."""
        return self.sinks + self.recent + 1

    @property
    def longest_pass(self) -> int:
        """Tokens of the longest forward pass: a block or a prompt."""
        return max(self.block_tokens, self.prompt_tokens)

    @property
    def slot_rows(self) -> int:
        """Rows per KV head and layer of a slot: a session at its budget, a block and a prompt."""
        return self.max_budget + self.block_tokens + self.prompt_tokens
