"""Models of the service's workers: the served model, the methods, load and counters."""

from dataclasses import dataclass

from kvrecall.client.models import JsonObject


@dataclass(frozen=True)
class Method:
    """Eviction method, repair, prefill or retrieval, with the JSON schema of its settings."""

    name: str
    summary: str
    settings_schema: JsonObject


@dataclass(frozen=True)
class Methods:
    """Eviction methods that a session may use, the repair, the prefill and the retrieval.

    Their settings are `method_settings`, `repair_settings`, `prefill` and `retrieve` of a session.
    """

    methods: tuple[Method, ...]
    repair: Method | None
    prefill: Method | None
    retrieve: Method | None


@dataclass(frozen=True)
class LayerKind:
    """Layers of the model that keep the same of the tokens before: rows, a window, a state.

    `token_bytes` are stored for each token, `state_bytes` for one recurrent state, in all of them.
    """

    name: str
    layers: int
    token_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Worker:
    """Served model and its limits. Budgets in rows; the others in tokens.

    `max_session_tokens` is the most of a session with recall; null: it has no end. Others end at `max_context`.
    `template_variables` are read by the chat template beside the conversation; `chat_template_kwargs` of a
    session may set them.
    """

    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    min_budget: int
    max_budget: int
    block_tokens: int
    max_context: int
    layer_kinds: tuple[LayerKind, ...] = ()
    max_session_tokens: int | None = None
    template_variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class TierStats:
    """Contents of a storage tier, and its counters since the worker started.

    `limit_bytes` 0: none. `hits`, `misses` and `refused_pages` are pages, `reads` and `writes` calls,
    `errors` failed ones. `failure` is why the last of them failed, empty while the tier works.
    """

    name: str
    bytes: int
    limit_bytes: int
    hits: int
    misses: int
    errors: int
    refused_pages: int
    read_bytes: int
    written_bytes: int
    reads: int
    writes: int
    read_seconds: float
    write_seconds: float
    failure: str


@dataclass(frozen=True)
class WorkerStats:
    """Slots and sessions of a worker now, and its counters since it started."""

    slots_in_use: int
    sessions: int
    queued: int
    lost_pages: int
    rebuilt_pages: int
    prefilled_tokens: int
    tiers: tuple[TierStats, ...]


@dataclass(frozen=True)
class WorkerLoad:
    """Reachable worker and its load. A `draining` worker accepts no new sessions.

    `stats` is null for a worker that does not answer now.
    """

    name: str
    address: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool
    stats: WorkerStats | None


@dataclass(frozen=True)
class Workers:
    """Reachable workers, by name."""

    workers: tuple[WorkerLoad, ...]
