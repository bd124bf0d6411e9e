import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RepairTrigger(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPAIR_TRIGGER_UNSPECIFIED: _ClassVar[RepairTrigger]
    REPAIR_TRIGGER_TOOL_CALL: _ClassVar[RepairTrigger]
    REPAIR_TRIGGER_TOOL_DELTA: _ClassVar[RepairTrigger]
    REPAIR_TRIGGER_TOOL_RESULT: _ClassVar[RepairTrigger]
    REPAIR_TRIGGER_LAST_OUTPUT: _ClassVar[RepairTrigger]
    REPAIR_TRIGGER_TURN: _ClassVar[RepairTrigger]

class LayerBudgets(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_BUDGETS_UNSPECIFIED: _ClassVar[LayerBudgets]
    LAYER_BUDGETS_UNIFORM: _ClassVar[LayerBudgets]
    LAYER_BUDGETS_PYRAMID: _ClassVar[LayerBudgets]
    LAYER_BUDGETS_SENSITIVITY: _ClassVar[LayerBudgets]

class EpisodeBuild(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EPISODE_BUILD_UNSPECIFIED: _ClassVar[EpisodeBuild]
    EPISODE_BUILD_ONE_PASS: _ClassVar[EpisodeBuild]
    EPISODE_BUILD_PER_EPISODE: _ClassVar[EpisodeBuild]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_PREFILLING: _ClassVar[SessionState]
    SESSION_STATE_DECODING: _ClassVar[SessionState]
    SESSION_STATE_PAUSED: _ClassVar[SessionState]
    SESSION_STATE_REPAIRING: _ClassVar[SessionState]

class CallStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_STATUS_UNSPECIFIED: _ClassVar[CallStatus]
    CALL_STATUS_PENDING: _ClassVar[CallStatus]
    CALL_STATUS_COMPLETED: _ClassVar[CallStatus]
    CALL_STATUS_FAILED: _ClassVar[CallStatus]
    CALL_STATUS_TIMED_OUT: _ClassVar[CallStatus]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_APPENDED: _ClassVar[FinishReason]

class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_TYPE_UNSPECIFIED: _ClassVar[EventType]
    EVENT_TYPE_STARTED: _ClassVar[EventType]
    EVENT_TYPE_DELTA: _ClassVar[EventType]
    EVENT_TYPE_COMPLETED: _ClassVar[EventType]
    EVENT_TYPE_FAILED: _ClassVar[EventType]

class SessionOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ORDER_UNSPECIFIED: _ClassVar[SessionOrder]
    SESSION_ORDER_CREATED: _ClassVar[SessionOrder]
    SESSION_ORDER_UPDATED: _ClassVar[SessionOrder]
    SESSION_ORDER_LENGTH: _ClassVar[SessionOrder]

class ToolMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_MODE_UNSPECIFIED: _ClassVar[ToolMode]
    TOOL_MODE_AUTO: _ClassVar[ToolMode]
    TOOL_MODE_NONE: _ClassVar[ToolMode]
    TOOL_MODE_REQUIRED: _ClassVar[ToolMode]
REPAIR_TRIGGER_UNSPECIFIED: RepairTrigger
REPAIR_TRIGGER_TOOL_CALL: RepairTrigger
REPAIR_TRIGGER_TOOL_DELTA: RepairTrigger
REPAIR_TRIGGER_TOOL_RESULT: RepairTrigger
REPAIR_TRIGGER_LAST_OUTPUT: RepairTrigger
REPAIR_TRIGGER_TURN: RepairTrigger
LAYER_BUDGETS_UNSPECIFIED: LayerBudgets
LAYER_BUDGETS_UNIFORM: LayerBudgets
LAYER_BUDGETS_PYRAMID: LayerBudgets
LAYER_BUDGETS_SENSITIVITY: LayerBudgets
EPISODE_BUILD_UNSPECIFIED: EpisodeBuild
EPISODE_BUILD_ONE_PASS: EpisodeBuild
EPISODE_BUILD_PER_EPISODE: EpisodeBuild
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_PREFILLING: SessionState
SESSION_STATE_DECODING: SessionState
SESSION_STATE_PAUSED: SessionState
SESSION_STATE_REPAIRING: SessionState
CALL_STATUS_UNSPECIFIED: CallStatus
CALL_STATUS_PENDING: CallStatus
CALL_STATUS_COMPLETED: CallStatus
CALL_STATUS_FAILED: CallStatus
CALL_STATUS_TIMED_OUT: CallStatus
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_APPENDED: FinishReason
EVENT_TYPE_UNSPECIFIED: EventType
EVENT_TYPE_STARTED: EventType
EVENT_TYPE_DELTA: EventType
EVENT_TYPE_COMPLETED: EventType
EVENT_TYPE_FAILED: EventType
SESSION_ORDER_UNSPECIFIED: SessionOrder
SESSION_ORDER_CREATED: SessionOrder
SESSION_ORDER_UPDATED: SessionOrder
SESSION_ORDER_LENGTH: SessionOrder
TOOL_MODE_UNSPECIFIED: ToolMode
TOOL_MODE_AUTO: ToolMode
TOOL_MODE_NONE: ToolMode
TOOL_MODE_REQUIRED: ToolMode

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: bool = ...) -> None: ...

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
    role: Role
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    reasoning: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RepairTriggers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[RepairTrigger]
    def __init__(self, values: _Optional[_Iterable[_Union[RepairTrigger, str]]] = ...) -> None: ...

class EpisodeSettings(_message.Message):
    __slots__ = ("count", "auto_count", "build")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTO_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    count: int
    auto_count: bool
    build: EpisodeBuild
    def __init__(self, count: _Optional[int] = ..., auto_count: bool = ..., build: _Optional[_Union[EpisodeBuild, str]] = ...) -> None: ...

class Reselection(_message.Message):
    __slots__ = ("every",)
    EVERY_FIELD_NUMBER: _ClassVar[int]
    every: int
    def __init__(self, every: _Optional[int] = ...) -> None: ...

class Research(_message.Message):
    __slots__ = ("method", "method_settings", "layer_budgets", "repair_rows", "repair_on", "repair_settings", "repair_timeout", "prefill", "retrieve", "reselect", "episodes", "no_episodes")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METHOD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_ROWS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_ON_FIELD_NUMBER: _ClassVar[int]
    REPAIR_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    RESELECT_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    NO_EPISODES_FIELD_NUMBER: _ClassVar[int]
    method: str
    method_settings: _struct_pb2.Struct
    layer_budgets: LayerBudgets
    repair_rows: int
    repair_on: RepairTriggers
    repair_settings: _struct_pb2.Struct
    repair_timeout: _duration_pb2.Duration
    prefill: _struct_pb2.Struct
    retrieve: _struct_pb2.Struct
    reselect: Reselection
    episodes: EpisodeSettings
    no_episodes: bool
    def __init__(self, method: _Optional[str] = ..., method_settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., layer_budgets: _Optional[_Union[LayerBudgets, str]] = ..., repair_rows: _Optional[int] = ..., repair_on: _Optional[_Union[RepairTriggers, _Mapping]] = ..., repair_settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., repair_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., retrieve: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., reselect: _Optional[_Union[Reselection, _Mapping]] = ..., episodes: _Optional[_Union[EpisodeSettings, _Mapping]] = ..., no_episodes: bool = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("idempotency_key", "model", "recall", "budget", "keep_reasoning", "seed", "tools", "metadata", "expires_after", "cache_salt", "research", "remember", "chat_template_kwargs")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    KEEP_REASONING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESEARCH_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    idempotency_key: str
    model: str
    recall: bool
    budget: int
    keep_reasoning: bool
    seed: int
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    metadata: _containers.ScalarMap[str, str]
    expires_after: _duration_pb2.Duration
    cache_salt: str
    research: Research
    remember: str
    chat_template_kwargs: _struct_pb2.Struct
    def __init__(self, idempotency_key: _Optional[str] = ..., model: _Optional[str] = ..., recall: bool = ..., budget: _Optional[int] = ..., keep_reasoning: bool = ..., seed: _Optional[int] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., expires_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cache_salt: _Optional[str] = ..., research: _Optional[_Union[Research, _Mapping]] = ..., remember: _Optional[str] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("limit", "cursor", "state", "method", "worker", "q", "order")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    cursor: str
    state: SessionState
    method: str
    worker: str
    q: str
    order: SessionOrder
    def __init__(self, limit: _Optional[int] = ..., cursor: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., method: _Optional[str] = ..., worker: _Optional[str] = ..., q: _Optional[str] = ..., order: _Optional[_Union[SessionOrder, str]] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_cursor", "scanned", "truncated")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_cursor: str
    scanned: int
    truncated: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_cursor: _Optional[str] = ..., scanned: _Optional[int] = ..., truncated: bool = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session", "idempotency_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    session: str
    idempotency_key: str
    def __init__(self, session: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session", "idempotency_key", "turn", "metadata", "queue")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    session: str
    idempotency_key: str
    turn: int
    metadata: Metadata
    queue: bool
    def __init__(self, session: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., turn: _Optional[int] = ..., metadata: _Optional[_Union[Metadata, _Mapping]] = ..., queue: bool = ...) -> None: ...

class MoveSessionRequest(_message.Message):
    __slots__ = ("session", "worker")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    session: str
    worker: str
    def __init__(self, session: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class PendingCall(_message.Message):
    __slots__ = ("id", "name", "arguments", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    status: CallStatus
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ..., status: _Optional[_Union[CallStatus, str]] = ...) -> None: ...

class ForkOrigin(_message.Message):
    __slots__ = ("session", "turn")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: int
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("id", "state", "model", "worker", "recall", "budget", "keep_reasoning", "seed", "tools", "metadata", "expires_after", "forked_from", "turns", "length", "pending_calls", "created_at", "updated_at", "memory", "durable", "research", "remember", "chat_template_kwargs")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    KEEP_REASONING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PENDING_CALLS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RESEARCH_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: SessionState
    model: str
    worker: str
    recall: bool
    budget: int
    keep_reasoning: bool
    seed: int
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    metadata: _containers.ScalarMap[str, str]
    expires_after: _duration_pb2.Duration
    forked_from: ForkOrigin
    turns: int
    length: int
    pending_calls: _containers.RepeatedCompositeFieldContainer[PendingCall]
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    memory: SessionMemory
    durable: bool
    research: Research
    remember: str
    chat_template_kwargs: _struct_pb2.Struct
    def __init__(self, id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., model: _Optional[str] = ..., worker: _Optional[str] = ..., recall: bool = ..., budget: _Optional[int] = ..., keep_reasoning: bool = ..., seed: _Optional[int] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., expires_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forked_from: _Optional[_Union[ForkOrigin, _Mapping]] = ..., turns: _Optional[int] = ..., length: _Optional[int] = ..., pending_calls: _Optional[_Iterable[_Union[PendingCall, _Mapping]]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., memory: _Optional[_Union[SessionMemory, _Mapping]] = ..., durable: bool = ..., research: _Optional[_Union[Research, _Mapping]] = ..., remember: _Optional[str] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class SessionMemory(_message.Message):
    __slots__ = ("length", "budget", "active_rows", "peak_rows", "bound_rows", "active_bytes", "evicted_rows", "promoted_rows")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PEAK_ROWS_FIELD_NUMBER: _ClassVar[int]
    BOUND_ROWS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    def __init__(self, length: _Optional[int] = ..., budget: _Optional[int] = ..., active_rows: _Optional[int] = ..., peak_rows: _Optional[int] = ..., bound_rows: _Optional[int] = ..., active_bytes: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., promoted_rows: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("save", "compare_with", "top")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    COMPARE_WITH_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    save: bool
    compare_with: str
    top: int
    def __init__(self, save: bool = ..., compare_with: _Optional[str] = ..., top: _Optional[int] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "tools")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    mode: ToolMode
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode: _Optional[_Union[ToolMode, str]] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("json_object", "json_schema")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: JsonSchema
    def __init__(self, json_object: bool = ..., json_schema: _Optional[_Union[JsonSchema, _Mapping]] = ...) -> None: ...

class JsonSchema(_message.Message):
    __slots__ = ("schema", "strict")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    schema: str
    strict: bool
    def __init__(self, schema: _Optional[str] = ..., strict: bool = ...) -> None: ...

class SendTurnRequest(_message.Message):
    __slots__ = ("session", "idempotency_key", "messages", "generate", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "queue", "repair", "wait_for_repairs", "logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "tool_choice", "parallel_tool_calls", "response_format")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_REPAIRS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    session: str
    idempotency_key: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    generate: bool
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    queue: bool
    repair: bool
    wait_for_repairs: bool
    logprobs: Logprobs
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    logit_bias: _containers.ScalarMap[int, float]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    response_format: ResponseFormat
    def __init__(self, session: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., generate: bool = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., queue: bool = ..., repair: bool = ..., wait_for_repairs: bool = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: bool = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ...) -> None: ...

class TurnEvent(_message.Message):
    __slots__ = ("text", "tool_call", "turn", "reasoning", "arguments")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    text: TextDelta
    tool_call: ToolCall
    turn: Turn
    reasoning: TextDelta
    arguments: ArgumentsDelta
    def __init__(self, text: _Optional[_Union[TextDelta, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCall, _Mapping]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., reasoning: _Optional[_Union[TextDelta, _Mapping]] = ..., arguments: _Optional[_Union[ArgumentsDelta, _Mapping]] = ...) -> None: ...

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

class TextDelta(_message.Message):
    __slots__ = ("text", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

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

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "reasoning_tokens", "dropped_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    dropped_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class Fidelity(_message.Message):
    __slots__ = ("tokens", "kl_mean", "top1_agreement")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KL_MEAN_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    kl_mean: float
    top1_agreement: float
    def __init__(self, tokens: _Optional[int] = ..., kl_mean: _Optional[float] = ..., top1_agreement: _Optional[float] = ...) -> None: ...

class TurnEpisode(_message.Message):
    __slots__ = ("episode", "similarity", "switched", "rows_moved", "rows_kept", "bytes_moved", "duration")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    ROWS_MOVED_FIELD_NUMBER: _ClassVar[int]
    ROWS_KEPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    episode: str
    similarity: float
    switched: bool
    rows_moved: int
    rows_kept: int
    bytes_moved: int
    duration: _duration_pb2.Duration
    def __init__(self, episode: _Optional[str] = ..., similarity: _Optional[float] = ..., switched: bool = ..., rows_moved: _Optional[int] = ..., rows_kept: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Repair(_message.Message):
    __slots__ = ("trigger", "signal_tokens", "observed_tokens", "candidates", "scored_rows", "share_scanned", "promoted", "demoted", "duration", "truncated", "bytes_read", "in_pause")
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SCANNED_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    IN_PAUSE_FIELD_NUMBER: _ClassVar[int]
    trigger: RepairTrigger
    signal_tokens: int
    observed_tokens: int
    candidates: int
    scored_rows: int
    share_scanned: float
    promoted: int
    demoted: int
    duration: _duration_pb2.Duration
    truncated: bool
    bytes_read: int
    in_pause: bool
    def __init__(self, trigger: _Optional[_Union[RepairTrigger, str]] = ..., signal_tokens: _Optional[int] = ..., observed_tokens: _Optional[int] = ..., candidates: _Optional[int] = ..., scored_rows: _Optional[int] = ..., share_scanned: _Optional[float] = ..., promoted: _Optional[int] = ..., demoted: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., truncated: bool = ..., bytes_read: _Optional[int] = ..., in_pause: bool = ...) -> None: ...

class RepairTotals(_message.Message):
    __slots__ = ("repairs", "signals", "scored_rows", "promoted", "demoted", "duration", "truncated", "skipped")
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    repairs: int
    signals: _containers.RepeatedScalarFieldContainer[RepairTrigger]
    scored_rows: int
    promoted: int
    demoted: int
    duration: _duration_pb2.Duration
    truncated: int
    skipped: int
    def __init__(self, repairs: _Optional[int] = ..., signals: _Optional[_Iterable[_Union[RepairTrigger, str]]] = ..., scored_rows: _Optional[int] = ..., promoted: _Optional[int] = ..., demoted: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., truncated: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class TurnMemory(_message.Message):
    __slots__ = ("length", "budget", "active_rows", "peak_rows", "bound_rows", "active_bytes", "evicted_rows", "promoted_rows", "tier_bytes", "repair", "repairs")
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
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: _containers.ScalarMap[str, int]
    repair: RepairTotals
    repairs: _containers.RepeatedCompositeFieldContainer[Repair]
    def __init__(self, length: _Optional[int] = ..., budget: _Optional[int] = ..., active_rows: _Optional[int] = ..., peak_rows: _Optional[int] = ..., bound_rows: _Optional[int] = ..., active_bytes: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., promoted_rows: _Optional[int] = ..., tier_bytes: _Optional[_Mapping[str, int]] = ..., repair: _Optional[_Union[RepairTotals, _Mapping]] = ..., repairs: _Optional[_Iterable[_Union[Repair, _Mapping]]] = ...) -> None: ...

class Reselections(_message.Message):
    __slots__ = ("count", "rows_in", "rows_out", "duration")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_FIELD_NUMBER: _ClassVar[int]
    ROWS_OUT_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    count: int
    rows_in: int
    rows_out: int
    duration: _duration_pb2.Duration
    def __init__(self, count: _Optional[int] = ..., rows_in: _Optional[int] = ..., rows_out: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TurnRetrieval(_message.Message):
    __slots__ = ("steps", "rows", "duration", "refused")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rows: int
    duration: _duration_pb2.Duration
    refused: bool
    def __init__(self, steps: _Optional[int] = ..., rows: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., refused: bool = ...) -> None: ...

class TurnRemembered(_message.Message):
    __slots__ = ("passages", "tokens", "prefilled_tokens", "sessions")
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    passages: int
    tokens: int
    prefilled_tokens: int
    sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, passages: _Optional[int] = ..., tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("session", "turn", "message", "finish_reason", "usage", "memory", "durations", "fidelity", "episode", "durable", "logprobs", "reselections", "prefill", "retrieval", "remembered")
    class DurationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _duration_pb2.Duration
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESELECTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: int
    message: Message
    finish_reason: FinishReason
    usage: Usage
    memory: TurnMemory
    durations: _containers.MessageMap[str, _duration_pb2.Duration]
    fidelity: Fidelity
    episode: TurnEpisode
    durable: bool
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    reselections: Reselections
    prefill: TurnPrefill
    retrieval: TurnRetrieval
    remembered: TurnRemembered
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[int] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., memory: _Optional[_Union[TurnMemory, _Mapping]] = ..., durations: _Optional[_Mapping[str, _duration_pb2.Duration]] = ..., fidelity: _Optional[_Union[Fidelity, _Mapping]] = ..., episode: _Optional[_Union[TurnEpisode, _Mapping]] = ..., durable: bool = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., reselections: _Optional[_Union[Reselections, _Mapping]] = ..., prefill: _Optional[_Union[TurnPrefill, _Mapping]] = ..., retrieval: _Optional[_Union[TurnRetrieval, _Mapping]] = ..., remembered: _Optional[_Union[TurnRemembered, _Mapping]] = ...) -> None: ...

class TurnPrefill(_message.Message):
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

class ToolCallStarted(_message.Message):
    __slots__ = ("arguments",)
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    arguments: str
    def __init__(self, arguments: _Optional[str] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("delta", "index")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    delta: str
    index: int
    def __init__(self, delta: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class ToolCallResult(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: str
    def __init__(self, result: _Optional[str] = ...) -> None: ...

class SendEventRequest(_message.Message):
    __slots__ = ("session", "idempotency_key", "call_id", "started", "delta", "completed", "failed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    session: str
    idempotency_key: str
    call_id: str
    started: ToolCallStarted
    delta: ToolCallDelta
    completed: ToolCallResult
    failed: ToolCallResult
    def __init__(self, session: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., call_id: _Optional[str] = ..., started: _Optional[_Union[ToolCallStarted, _Mapping]] = ..., delta: _Optional[_Union[ToolCallDelta, _Mapping]] = ..., completed: _Optional[_Union[ToolCallResult, _Mapping]] = ..., failed: _Optional[_Union[ToolCallResult, _Mapping]] = ...) -> None: ...

class EventReceipt(_message.Message):
    __slots__ = ("session", "call_id", "type", "status", "state", "outstanding", "late")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    session: str
    call_id: str
    type: EventType
    status: CallStatus
    state: SessionState
    outstanding: _containers.RepeatedScalarFieldContainer[str]
    late: bool
    def __init__(self, session: _Optional[str] = ..., call_id: _Optional[str] = ..., type: _Optional[_Union[EventType, str]] = ..., status: _Optional[_Union[CallStatus, str]] = ..., state: _Optional[_Union[SessionState, str]] = ..., outstanding: _Optional[_Iterable[str]] = ..., late: bool = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("session", "length", "budget", "active_rows", "peak_rows", "bound_rows", "active_bytes", "evicted_rows", "promoted_rows", "tier_bytes", "layer_active_rows", "layer_peak_rows", "layer_bound_rows", "in_slot", "retrieval_bytes")
    class TierBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PEAK_ROWS_FIELD_NUMBER: _ClassVar[int]
    BOUND_ROWS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_ACTIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYER_PEAK_ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BOUND_ROWS_FIELD_NUMBER: _ClassVar[int]
    IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: str
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: _containers.ScalarMap[str, int]
    layer_active_rows: _containers.RepeatedScalarFieldContainer[int]
    layer_peak_rows: _containers.RepeatedScalarFieldContainer[int]
    layer_bound_rows: _containers.RepeatedScalarFieldContainer[int]
    in_slot: bool
    retrieval_bytes: int
    def __init__(self, session: _Optional[str] = ..., length: _Optional[int] = ..., budget: _Optional[int] = ..., active_rows: _Optional[int] = ..., peak_rows: _Optional[int] = ..., bound_rows: _Optional[int] = ..., active_bytes: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., promoted_rows: _Optional[int] = ..., tier_bytes: _Optional[_Mapping[str, int]] = ..., layer_active_rows: _Optional[_Iterable[int]] = ..., layer_peak_rows: _Optional[_Iterable[int]] = ..., layer_bound_rows: _Optional[_Iterable[int]] = ..., in_slot: bool = ..., retrieval_bytes: _Optional[int] = ...) -> None: ...

class ListRepairsRequest(_message.Message):
    __slots__ = ("session", "limit")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session: str
    limit: int
    def __init__(self, session: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRepairsResponse(_message.Message):
    __slots__ = ("session", "repairs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    session: str
    repairs: _containers.RepeatedCompositeFieldContainer[PastRepair]
    def __init__(self, session: _Optional[str] = ..., repairs: _Optional[_Iterable[_Union[PastRepair, _Mapping]]] = ...) -> None: ...

class Passage(_message.Message):
    __slots__ = ("start", "stop", "before", "promoted", "after")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    before: str
    promoted: str
    after: str
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., before: _Optional[str] = ..., promoted: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class PastRepair(_message.Message):
    __slots__ = ("repair", "number", "turn", "at", "signal", "passages", "started_at", "call_id")
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    PASSAGES_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    repair: Repair
    number: int
    turn: int
    at: _timestamp_pb2.Timestamp
    signal: str
    passages: _containers.RepeatedCompositeFieldContainer[Passage]
    started_at: _timestamp_pb2.Timestamp
    call_id: str
    def __init__(self, repair: _Optional[_Union[Repair, _Mapping]] = ..., number: _Optional[int] = ..., turn: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., signal: _Optional[str] = ..., passages: _Optional[_Iterable[_Union[Passage, _Mapping]]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., call_id: _Optional[str] = ...) -> None: ...

class ListEpisodesRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class ListEpisodesResponse(_message.Message):
    __slots__ = ("session", "settings", "segments", "built_segments", "builds", "episodes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BUILT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BUILDS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    session: str
    settings: EpisodeSettings
    segments: int
    built_segments: int
    builds: int
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    def __init__(self, session: _Optional[str] = ..., settings: _Optional[_Union[EpisodeSettings, _Mapping]] = ..., segments: _Optional[int] = ..., built_segments: _Optional[int] = ..., builds: _Optional[int] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("id", "active", "segments", "tokens", "medoid", "matched")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEDOID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    id: str
    active: bool
    segments: int
    tokens: int
    medoid: str
    matched: int
    def __init__(self, id: _Optional[str] = ..., active: bool = ..., segments: _Optional[int] = ..., tokens: _Optional[int] = ..., medoid: _Optional[str] = ..., matched: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("model", "fingerprint", "layers", "kv_heads", "head_dim", "slots", "min_budget", "max_budget", "block_tokens", "max_context", "layer_kinds", "max_session_tokens", "template_variables")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MIN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LAYER_KINDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
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
    layer_kinds: _containers.RepeatedCompositeFieldContainer[LayerKind]
    max_session_tokens: int
    template_variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., slots: _Optional[int] = ..., min_budget: _Optional[int] = ..., max_budget: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., layer_kinds: _Optional[_Iterable[_Union[LayerKind, _Mapping]]] = ..., max_session_tokens: _Optional[int] = ..., template_variables: _Optional[_Iterable[str]] = ...) -> None: ...

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

class ListMethodsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMethodsResponse(_message.Message):
    __slots__ = ("methods", "repair", "prefill", "retrieve")
    METHODS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    methods: _containers.RepeatedCompositeFieldContainer[Method]
    repair: Method
    prefill: Method
    retrieve: Method
    def __init__(self, methods: _Optional[_Iterable[_Union[Method, _Mapping]]] = ..., repair: _Optional[_Union[Method, _Mapping]] = ..., prefill: _Optional[_Union[Method, _Mapping]] = ..., retrieve: _Optional[_Union[Method, _Mapping]] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "summary", "settings_schema")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    settings_schema: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., settings_schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "address", "slots", "free_slots", "queued", "sessions", "draining", "stats")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    slots: int
    free_slots: int
    queued: int
    sessions: int
    draining: bool
    stats: WorkerStats
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., queued: _Optional[int] = ..., sessions: _Optional[int] = ..., draining: bool = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("slots_in_use", "sessions", "queued", "lost_pages", "rebuilt_pages", "prefilled_tokens", "tiers")
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    REBUILT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    slots_in_use: int
    sessions: int
    queued: int
    lost_pages: int
    rebuilt_pages: int
    prefilled_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    def __init__(self, slots_in_use: _Optional[int] = ..., sessions: _Optional[int] = ..., queued: _Optional[int] = ..., lost_pages: _Optional[int] = ..., rebuilt_pages: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "bytes", "limit_bytes", "hits", "misses", "errors", "refused_pages", "read_bytes", "written_bytes", "reads", "writes", "read_duration", "write_duration", "failure")
    NAME_FIELD_NUMBER: _ClassVar[int]
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
    READ_DURATION_FIELD_NUMBER: _ClassVar[int]
    WRITE_DURATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
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
    read_duration: _duration_pb2.Duration
    write_duration: _duration_pb2.Duration
    failure: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., errors: _Optional[int] = ..., refused_pages: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., reads: _Optional[int] = ..., writes: _Optional[int] = ..., read_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., write_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...
