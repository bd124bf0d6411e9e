from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("session", "epoch", "budget", "repair_rows", "method", "method_settings", "seed", "tools", "layer_budgets", "repair_settings", "options", "tenant", "weight", "row_key", "page_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    REPAIR_ROWS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METHOD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ROW_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    budget: int
    repair_rows: int
    method: str
    method_settings: str
    seed: int
    tools: _containers.RepeatedScalarFieldContainer[str]
    layer_budgets: str
    repair_settings: str
    options: str
    tenant: str
    weight: float
    row_key: bytes
    page_key: bytes
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., budget: _Optional[int] = ..., repair_rows: _Optional[int] = ..., method: _Optional[str] = ..., method_settings: _Optional[str] = ..., seed: _Optional[int] = ..., tools: _Optional[_Iterable[str]] = ..., layer_budgets: _Optional[str] = ..., repair_settings: _Optional[str] = ..., options: _Optional[str] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., row_key: _Optional[bytes] = ..., page_key: _Optional[bytes] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("length", "pending", "selection", "eviction_scores", "promoted_rows", "recent", "episode", "patched_prompt", "segments", "state_version", "layer_rows", "deferred_signal", "unsettled", "page_ids", "snapshots", "dropped_tokens", "anchor")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    EVICTION_SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    PATCHED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_ROWS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    length: int
    pending: _containers.RepeatedScalarFieldContainer[int]
    selection: bytes
    eviction_scores: bytes
    promoted_rows: int
    recent: _containers.RepeatedCompositeFieldContainer[Message]
    episode: str
    patched_prompt: _containers.RepeatedScalarFieldContainer[int]
    segments: _containers.RepeatedCompositeFieldContainer[Span]
    state_version: int
    layer_rows: _containers.RepeatedScalarFieldContainer[int]
    deferred_signal: _containers.RepeatedScalarFieldContainer[int]
    unsettled: int
    page_ids: bytes
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    dropped_tokens: int
    anchor: int
    def __init__(self, length: _Optional[int] = ..., pending: _Optional[_Iterable[int]] = ..., selection: _Optional[bytes] = ..., eviction_scores: _Optional[bytes] = ..., promoted_rows: _Optional[int] = ..., recent: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., episode: _Optional[str] = ..., patched_prompt: _Optional[_Iterable[int]] = ..., segments: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., state_version: _Optional[int] = ..., layer_rows: _Optional[_Iterable[int]] = ..., deferred_signal: _Optional[_Iterable[int]] = ..., unsettled: _Optional[int] = ..., page_ids: _Optional[bytes] = ..., snapshots: _Optional[_Iterable[int]] = ..., dropped_tokens: _Optional[int] = ..., anchor: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("spec", "state")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    spec: SessionSpec
    state: SessionState
    def __init__(self, spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class LoggedTurn(_message.Message):
    __slots__ = ("token_ids", "prompt_tokens", "output_tokens", "messages", "promoted", "deferred_tokens", "recorded_tokens", "unsettled_tokens", "rewrite", "shared_tokens", "remembered_tokens", "remembered_behind")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECORDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWRITE_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_BEHIND_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    output_tokens: int
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    promoted: _containers.RepeatedScalarFieldContainer[int]
    deferred_tokens: int
    recorded_tokens: int
    unsettled_tokens: int
    rewrite: Rewrite
    shared_tokens: int
    remembered_tokens: int
    remembered_behind: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., promoted: _Optional[_Iterable[int]] = ..., deferred_tokens: _Optional[int] = ..., recorded_tokens: _Optional[int] = ..., unsettled_tokens: _Optional[int] = ..., rewrite: _Optional[_Union[Rewrite, _Mapping]] = ..., shared_tokens: _Optional[int] = ..., remembered_tokens: _Optional[int] = ..., remembered_behind: _Optional[int] = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("start", "stop", "token_ids")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Rewrite(_message.Message):
    __slots__ = ("kept", "rows", "edits")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    kept: int
    rows: int
    edits: _containers.RepeatedCompositeFieldContainer[Edit]
    def __init__(self, kept: _Optional[int] = ..., rows: _Optional[int] = ..., edits: _Optional[_Iterable[_Union[Edit, _Mapping]]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("spec", "turns", "page_ids")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    spec: SessionSpec
    turns: _containers.RepeatedCompositeFieldContainer[LoggedTurn]
    page_ids: bytes
    def __init__(self, spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[LoggedTurn, _Mapping]]] = ..., page_ids: _Optional[bytes] = ...) -> None: ...

class ForkResult(_message.Message):
    __slots__ = ("memory", "state")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    memory: MemoryReport
    state: SessionState
    def __init__(self, memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class RebuildRequest(_message.Message):
    __slots__ = ("spec", "state", "turns")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    spec: SessionSpec
    state: SessionState
    turns: _containers.RepeatedCompositeFieldContainer[LoggedTurn]
    def __init__(self, spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[LoggedTurn, _Mapping]]] = ...) -> None: ...

class RebuildResult(_message.Message):
    __slots__ = ("pages", "seconds", "memory")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    pages: int
    seconds: float
    memory: MemoryReport
    def __init__(self, pages: _Optional[int] = ..., seconds: _Optional[float] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("catalog",)
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    catalog: str
    def __init__(self, catalog: _Optional[str] = ...) -> None: ...

class ListPagesRequest(_message.Message):
    __slots__ = ("catalog", "older_than_seconds")
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    catalog: str
    older_than_seconds: float
    def __init__(self, catalog: _Optional[str] = ..., older_than_seconds: _Optional[float] = ...) -> None: ...

class PageList(_message.Message):
    __slots__ = ("page_ids",)
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    page_ids: bytes
    def __init__(self, page_ids: _Optional[bytes] = ...) -> None: ...

class DeletePagesRequest(_message.Message):
    __slots__ = ("catalog", "page_ids")
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    catalog: str
    page_ids: bytes
    def __init__(self, catalog: _Optional[str] = ..., page_ids: _Optional[bytes] = ...) -> None: ...

class DeletePagesResult(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class MemoryRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "top_logprobs", "constraint", "min_tokens", "stop_token_ids", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    top_logprobs: int
    constraint: Constraint
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., top_logprobs: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("id", "bias")
    ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    id: int
    bias: float
    def __init__(self, id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("schema", "strict", "tool_choice", "tools", "single_call", "grammar")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_CALL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    schema: str
    strict: bool
    tool_choice: str
    tools: _containers.RepeatedScalarFieldContainer[str]
    single_call: bool
    grammar: str
    def __init__(self, schema: _Optional[str] = ..., strict: bool = ..., tool_choice: _Optional[str] = ..., tools: _Optional[_Iterable[str]] = ..., single_call: bool = ..., grammar: _Optional[str] = ...) -> None: ...

class TurnRequest(_message.Message):
    __slots__ = ("session", "epoch", "messages", "generate", "sampling", "repair", "keep_distribution", "compare_with", "episode", "length", "prompt", "opening", "flow", "background", "earlier", "remembered", "defer_repair")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    KEEP_DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    COMPARE_WITH_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    DEFER_REPAIR_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    generate: bool
    sampling: Sampling
    repair: bool
    keep_distribution: bool
    compare_with: str
    episode: Episode
    length: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    opening: str
    flow: str
    background: bool
    earlier: Earlier
    remembered: _containers.RepeatedCompositeFieldContainer[Passage]
    defer_repair: bool
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., generate: bool = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., repair: bool = ..., keep_distribution: bool = ..., compare_with: _Optional[str] = ..., episode: _Optional[_Union[Episode, _Mapping]] = ..., length: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., opening: _Optional[str] = ..., flow: _Optional[str] = ..., background: bool = ..., earlier: _Optional[_Union[Earlier, _Mapping]] = ..., remembered: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ..., defer_repair: bool = ...) -> None: ...

class Passage(_message.Message):
    __slots__ = ("page_ids", "start", "stop", "token_ids")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    page_ids: bytes
    start: int
    stop: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_ids: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RememberedReport(_message.Message):
    __slots__ = ("passages", "tokens", "prefilled_tokens", "behind")
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    passages: int
    tokens: int
    prefilled_tokens: int
    behind: int
    def __init__(self, passages: _Optional[int] = ..., tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class Earlier(_message.Message):
    __slots__ = ("messages", "token_ids")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "stop", "similarity")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    similarity: float
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., similarity: _Optional[float] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("id", "rows", "patched_prompt", "length", "segments")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PATCHED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    rows: bytes
    patched_prompt: _containers.RepeatedScalarFieldContainer[int]
    length: int
    segments: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, id: _Optional[str] = ..., rows: _Optional[bytes] = ..., patched_prompt: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class EpisodePlan(_message.Message):
    __slots__ = ("id", "patched_prompt", "segments")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATCHED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    patched_prompt: _containers.RepeatedScalarFieldContainer[int]
    segments: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, id: _Optional[str] = ..., patched_prompt: _Optional[_Iterable[int]] = ..., segments: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class BuildEpisodesRequest(_message.Message):
    __slots__ = ("session", "epoch", "plans", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    plans: _containers.RepeatedCompositeFieldContainer[EpisodePlan]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., plans: _Optional[_Iterable[_Union[EpisodePlan, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BuildEpisodesResult(_message.Message):
    __slots__ = ("episodes", "scored_rows", "seconds")
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    scored_rows: int
    seconds: float
    def __init__(self, episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., scored_rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SwitchReport(_message.Message):
    __slots__ = ("episode", "rows_moved", "rows_kept", "bytes_moved", "seconds")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    ROWS_MOVED_FIELD_NUMBER: _ClassVar[int]
    ROWS_KEPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    episode: str
    rows_moved: int
    rows_kept: int
    bytes_moved: int
    seconds: float
    def __init__(self, episode: _Optional[str] = ..., rows_moved: _Optional[int] = ..., rows_kept: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class EmbedResult(_message.Message):
    __slots__ = ("dimensions", "vectors")
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    dimensions: int
    vectors: bytes
    def __init__(self, dimensions: _Optional[int] = ..., vectors: _Optional[bytes] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("ids", "text", "reasoning", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    reasoning: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., reasoning: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "utf8", "logprob", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    UTF8_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: str
    utf8: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token: _Optional[str] = ..., utf8: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Fidelity(_message.Message):
    __slots__ = ("tokens", "kl_mean", "top1_agreement")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KL_MEAN_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    kl_mean: float
    top1_agreement: float
    def __init__(self, tokens: _Optional[int] = ..., kl_mean: _Optional[float] = ..., top1_agreement: _Optional[float] = ...) -> None: ...

class RepairReport(_message.Message):
    __slots__ = ("trigger", "signal_tokens", "scored_rows", "promoted", "seconds", "candidates", "demoted_rows", "truncated", "bytes_read", "observed_tokens")
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    trigger: str
    signal_tokens: int
    scored_rows: int
    promoted: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    candidates: int
    demoted_rows: int
    truncated: bool
    bytes_read: int
    observed_tokens: int
    def __init__(self, trigger: _Optional[str] = ..., signal_tokens: _Optional[int] = ..., scored_rows: _Optional[int] = ..., promoted: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., candidates: _Optional[int] = ..., demoted_rows: _Optional[int] = ..., truncated: bool = ..., bytes_read: _Optional[int] = ..., observed_tokens: _Optional[int] = ...) -> None: ...

class ReselectionReport(_message.Message):
    __slots__ = ("count", "rows_in", "rows_out", "seconds")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_FIELD_NUMBER: _ClassVar[int]
    ROWS_OUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    count: int
    rows_in: int
    rows_out: int
    seconds: float
    def __init__(self, count: _Optional[int] = ..., rows_in: _Optional[int] = ..., rows_out: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class RetrievalReport(_message.Message):
    __slots__ = ("steps", "rows", "seconds", "refused")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rows: int
    seconds: float
    refused: bool
    def __init__(self, steps: _Optional[int] = ..., rows: _Optional[int] = ..., seconds: _Optional[float] = ..., refused: bool = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("length", "budget", "active_rows", "peak_rows", "bound_rows", "active_bytes", "evicted_rows", "promoted_rows", "tier_bytes", "in_slot", "retrieval_bytes", "unsettled", "dropped_tokens")
    class TierBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PEAK_ROWS_FIELD_NUMBER: _ClassVar[int]
    BOUND_ROWS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    length: int
    budget: int
    active_rows: _containers.RepeatedScalarFieldContainer[int]
    peak_rows: _containers.RepeatedScalarFieldContainer[int]
    bound_rows: _containers.RepeatedScalarFieldContainer[int]
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: _containers.ScalarMap[str, int]
    in_slot: bool
    retrieval_bytes: int
    unsettled: int
    dropped_tokens: int
    def __init__(self, length: _Optional[int] = ..., budget: _Optional[int] = ..., active_rows: _Optional[_Iterable[int]] = ..., peak_rows: _Optional[_Iterable[int]] = ..., bound_rows: _Optional[_Iterable[int]] = ..., active_bytes: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., promoted_rows: _Optional[int] = ..., tier_bytes: _Optional[_Mapping[str, int]] = ..., in_slot: bool = ..., retrieval_bytes: _Optional[int] = ..., unsettled: _Optional[int] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("blocks", "cover_min", "cover_mean", "density")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COVER_MIN_FIELD_NUMBER: _ClassVar[int]
    COVER_MEAN_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    cover_min: float
    cover_mean: float
    density: float
    def __init__(self, blocks: _Optional[int] = ..., cover_min: _Optional[float] = ..., cover_mean: _Optional[float] = ..., density: _Optional[float] = ...) -> None: ...

class TurnDone(_message.Message):
    __slots__ = ("finish_reason", "message", "token_ids", "prompt_tokens", "output_tokens", "memory", "repair", "seconds", "fidelity", "state", "switched", "utterance_tokens", "durable", "shared_pages", "reasoning_tokens", "stop_sequence", "prefilled_tokens", "deferred_tokens", "reselections", "prefill", "retrieval", "prompt_logprobs", "recorded_tokens", "settled_tokens", "pending_pages", "rewrite", "remembered", "phase_starts")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PhaseStartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    UTTERANCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESELECTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RECORDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PAGES_FIELD_NUMBER: _ClassVar[int]
    REWRITE_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    PHASE_STARTS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    message: Message
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    output_tokens: int
    memory: MemoryReport
    repair: RepairReport
    seconds: _containers.ScalarMap[str, float]
    fidelity: Fidelity
    state: SessionState
    switched: SwitchReport
    utterance_tokens: _containers.RepeatedScalarFieldContainer[int]
    durable: bool
    shared_pages: int
    reasoning_tokens: int
    stop_sequence: str
    prefilled_tokens: int
    deferred_tokens: int
    reselections: ReselectionReport
    prefill: PrefillReport
    retrieval: RetrievalReport
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    recorded_tokens: int
    settled_tokens: int
    pending_pages: int
    rewrite: Rewrite
    remembered: RememberedReport
    phase_starts: _containers.ScalarMap[str, float]
    def __init__(self, finish_reason: _Optional[str] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., repair: _Optional[_Union[RepairReport, _Mapping]] = ..., seconds: _Optional[_Mapping[str, float]] = ..., fidelity: _Optional[_Union[Fidelity, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., switched: _Optional[_Union[SwitchReport, _Mapping]] = ..., utterance_tokens: _Optional[_Iterable[int]] = ..., durable: bool = ..., shared_pages: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., stop_sequence: _Optional[str] = ..., prefilled_tokens: _Optional[int] = ..., deferred_tokens: _Optional[int] = ..., reselections: _Optional[_Union[ReselectionReport, _Mapping]] = ..., prefill: _Optional[_Union[PrefillReport, _Mapping]] = ..., retrieval: _Optional[_Union[RetrievalReport, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., recorded_tokens: _Optional[int] = ..., settled_tokens: _Optional[int] = ..., pending_pages: _Optional[int] = ..., rewrite: _Optional[_Union[Rewrite, _Mapping]] = ..., remembered: _Optional[_Union[RememberedReport, _Mapping]] = ..., phase_starts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TurnPlanned(_message.Message):
    __slots__ = ("held_tokens", "prompt_tokens", "max_tokens")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    prompt_tokens: int
    max_tokens: int
    def __init__(self, held_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class TurnEvent(_message.Message):
    __slots__ = ("token", "tool_call", "done", "arguments", "planned")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    token: TokenChunk
    tool_call: ToolCall
    done: TurnDone
    arguments: ArgumentsDelta
    planned: TurnPlanned
    def __init__(self, token: _Optional[_Union[TokenChunk, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCall, _Mapping]] = ..., done: _Optional[_Union[TurnDone, _Mapping]] = ..., arguments: _Optional[_Union[ArgumentsDelta, _Mapping]] = ..., planned: _Optional[_Union[TurnPlanned, _Mapping]] = ...) -> None: ...

class ArgumentsDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class RepairRequest(_message.Message):
    __slots__ = ("session", "epoch", "trigger", "text", "messages", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    trigger: str
    text: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., trigger: _Optional[str] = ..., text: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SettleResult(_message.Message):
    __slots__ = ("settled_tokens", "durable", "memory", "state")
    SETTLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    settled_tokens: int
    durable: bool
    memory: MemoryReport
    state: SessionState
    def __init__(self, settled_tokens: _Optional[int] = ..., durable: bool = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class PrefillAheadRequest(_message.Message):
    __slots__ = ("session", "epoch", "messages")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class PrefillAheadResult(_message.Message):
    __slots__ = ("prompt_tokens",)
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ...) -> None: ...

class TakeUsageRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prefilled_tokens", "decoded_tokens", "repaired_tokens", "settled_tokens")
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefilled_tokens: int
    decoded_tokens: int
    repaired_tokens: int
    settled_tokens: int
    def __init__(self, prefilled_tokens: _Optional[int] = ..., decoded_tokens: _Optional[int] = ..., repaired_tokens: _Optional[int] = ..., settled_tokens: _Optional[int] = ...) -> None: ...

class StopEarlyRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[TokenChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[TokenChunk, _Mapping]]] = ...) -> None: ...

class DetokenizeResult(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("messages", "tools", "text", "special_tokens", "without_answer", "pieces", "opening", "template_arguments", "keep_reasoning")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_REASONING_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools: _containers.RepeatedScalarFieldContainer[str]
    text: str
    special_tokens: bool
    without_answer: bool
    pieces: bool
    opening: str
    template_arguments: str
    keep_reasoning: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ..., special_tokens: bool = ..., without_answer: bool = ..., pieces: bool = ..., opening: _Optional[str] = ..., template_arguments: _Optional[str] = ..., keep_reasoning: bool = ...) -> None: ...

class TokenizeResult(_message.Message):
    __slots__ = ("ids", "pieces")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class MapRowsRequest(_message.Message):
    __slots__ = ("state", "start", "stop", "columns", "head", "tokens")
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    state: SessionState
    start: int
    stop: int
    columns: int
    head: int
    tokens: bool
    def __init__(self, state: _Optional[_Union[SessionState, _Mapping]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., columns: _Optional[int] = ..., head: _Optional[int] = ..., tokens: bool = ...) -> None: ...

class LayerCells(_message.Message):
    __slots__ = ("active", "promoted")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    active: bytes
    promoted: bytes
    def __init__(self, active: _Optional[bytes] = ..., promoted: _Optional[bytes] = ...) -> None: ...

class MapRowsResult(_message.Message):
    __slots__ = ("layers", "rows", "scores", "sinks", "recent")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerCells]
    rows: bytes
    scores: _containers.RepeatedScalarFieldContainer[float]
    sinks: int
    recent: int
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerCells, _Mapping]]] = ..., rows: _Optional[bytes] = ..., scores: _Optional[_Iterable[float]] = ..., sinks: _Optional[int] = ..., recent: _Optional[int] = ...) -> None: ...

class RepairResult(_message.Message):
    __slots__ = ("report", "memory", "state")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    report: RepairReport
    memory: MemoryReport
    state: SessionState
    def __init__(self, report: _Optional[_Union[RepairReport, _Mapping]] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class RepairEvent(_message.Message):
    __slots__ = ("accepted", "result")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    result: RepairResult
    def __init__(self, accepted: bool = ..., result: _Optional[_Union[RepairResult, _Mapping]] = ...) -> None: ...

class MethodInfo(_message.Message):
    __slots__ = ("name", "summary", "settings_schema", "episodes", "retrieves")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    RETRIEVES_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    settings_schema: str
    episodes: bool
    retrieves: bool
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., settings_schema: _Optional[str] = ..., episodes: bool = ..., retrieves: bool = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("model", "fingerprint", "layers", "kv_heads", "head_dim", "slots", "max_budget", "min_budget", "block_tokens", "max_context", "methods", "repair", "page_tokens", "token_bytes", "protocol_version", "prefill", "retrieve", "call_format", "sampling", "layer_kinds", "rewrites", "max_session_tokens", "template_variables")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MIN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LAYER_KINDS_FIELD_NUMBER: _ClassVar[int]
    REWRITES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    max_budget: int
    min_budget: int
    block_tokens: int
    max_context: int
    methods: _containers.RepeatedCompositeFieldContainer[MethodInfo]
    repair: MethodInfo
    page_tokens: int
    token_bytes: int
    protocol_version: int
    prefill: MethodInfo
    retrieve: MethodInfo
    call_format: str
    sampling: SamplingDefaults
    layer_kinds: _containers.RepeatedCompositeFieldContainer[LayerKind]
    rewrites: bool
    max_session_tokens: int
    template_variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., slots: _Optional[int] = ..., max_budget: _Optional[int] = ..., min_budget: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., methods: _Optional[_Iterable[_Union[MethodInfo, _Mapping]]] = ..., repair: _Optional[_Union[MethodInfo, _Mapping]] = ..., page_tokens: _Optional[int] = ..., token_bytes: _Optional[int] = ..., protocol_version: _Optional[int] = ..., prefill: _Optional[_Union[MethodInfo, _Mapping]] = ..., retrieve: _Optional[_Union[MethodInfo, _Mapping]] = ..., call_format: _Optional[str] = ..., sampling: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., layer_kinds: _Optional[_Iterable[_Union[LayerKind, _Mapping]]] = ..., rewrites: bool = ..., max_session_tokens: _Optional[int] = ..., template_variables: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerKind(_message.Message):
    __slots__ = ("name", "layers", "token_bytes", "state_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: int
    token_bytes: int
    state_bytes: int
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[int] = ..., token_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("slots_in_use", "sessions", "queued", "tiers", "lost_pages", "rebuilt_pages", "prefilled_tokens")
    class TiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStats, _Mapping]] = ...) -> None: ...
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    REBUILT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slots_in_use: int
    sessions: int
    queued: int
    tiers: _containers.MessageMap[str, TierStats]
    lost_pages: int
    rebuilt_pages: int
    prefilled_tokens: int
    def __init__(self, slots_in_use: _Optional[int] = ..., sessions: _Optional[int] = ..., queued: _Optional[int] = ..., tiers: _Optional[_Mapping[str, TierStats]] = ..., lost_pages: _Optional[int] = ..., rebuilt_pages: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("bytes", "limit_bytes", "hits", "misses", "errors", "refused_pages", "read_bytes", "written_bytes", "reads", "writes", "read_seconds", "write_seconds", "failure")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PAGES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., errors: _Optional[int] = ..., refused_pages: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., reads: _Optional[int] = ..., writes: _Optional[int] = ..., read_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("name", "address", "model", "fingerprint", "slots", "free_slots", "queued", "sessions", "draining", "protocol_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    model: str
    fingerprint: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool
    protocol_version: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., queued: _Optional[int] = ..., sessions: _Optional[int] = ..., draining: bool = ..., protocol_version: _Optional[int] = ...) -> None: ...
