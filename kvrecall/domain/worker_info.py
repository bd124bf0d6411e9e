"""A worker's model, shape and limits, as it describes itself."""

from dataclasses import dataclass

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults

ENDLESS = 2**31 - 2
"""The most tokens of a session that has no end: a row's position is a number of 32 bits."""


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
    `max_session_tokens`: of a session with recall; None: it has no end. `template_variables`:
    variables that the chat template reads beside the conversation.
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
    max_session_tokens: int | None = None
    template_variables: tuple[str, ...] = ()

    @property
    def most_tokens(self) -> int:
        """The most tokens of a session without recall."""
        return min(self.max_context, self.max_session_tokens or self.max_context)

    def get_limit(self, *, recall: bool) -> int | None:
        """Return the most tokens of a session, with recall or without; None: it has no end."""
        return self.max_session_tokens if recall else self.most_tokens

    def advise_recall(self) -> str:
        """Return what to add to the error of a session without recall: nothing if recall ends there, too."""
        if self.max_session_tokens is not None and self.max_session_tokens <= self.max_context:
            return ""
        return ", with the model's context. A session with recall goes on behind it"

    @property
    def has_states(self) -> bool:
        """True if some layers have a recurrent state."""
        return any(kind.state_bytes for kind in self.layer_kinds)
