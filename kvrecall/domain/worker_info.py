"""A worker's model, shape and limits, as it describes itself."""

from dataclasses import dataclass

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults


@dataclass(frozen=True)
class MethodInfo:
    """An eviction method, repair, prefill or retrieval. `settings_schema` is the JSON schema of its settings.

    `episodes`: evictions observe with the active episode's prompt, so a session may have episodes.
    `retrieves`: decoding retrieves rows unless `retrieve` says otherwise.
    """

    name: str
    summary: str = ""
    settings_schema: str = "{}"
    episodes: bool = False
    retrieves: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that keep the same of the tokens before.

    `token_bytes`: stored for each token, `state_bytes`: of one recurrent state, both in all of them.
    """

    name: str
    layers: int
    token_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class WorkerInfo:
    """Facts that are fixed while a worker lives.

    Budgets in rows, `block_tokens` and `page_tokens` in tokens. `call_format`: the form of the
    model's tool calls; empty if it is not known. `sampling`: of turns that name none.
    `rewrites`: the chat template says answers otherwise once a user's message follows.
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
    page_tokens: int
    token_bytes: int
    methods: tuple[MethodInfo, ...]
    repair: MethodInfo | None
    call_format: str = ""
    prefill: MethodInfo | None = None
    retrieve: MethodInfo | None = None
    sampling: SamplingDefaults = GREEDY
    layer_kinds: tuple[LayerKind, ...] = ()
    rewrites: bool = False

    @property
    def has_states(self) -> bool:
        """True if some layers have a recurrent state."""
        return any(kind.state_bytes for kind in self.layer_kinds)
