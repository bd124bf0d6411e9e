"""The stable error codes, each with its HTTP and gRPC status."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """A stable code of the public contract. Messages may change, codes do not.

    `http_status` is the status of the HTTP answer, `grpc_status` the name of the gRPC status code.
    """

    http_status: int
    grpc_status: str

    def __new__(cls, code: str, http_status: int, grpc_status: str) -> "ErrorCode":
        """Make a member that equals its code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.http_status = http_status
        member.grpc_status = grpc_status
        return member

    @classmethod
    def parse(cls, code: str) -> "ErrorCode":
        """Return the member of a code that came over the wire.

        WORKER_REFUSED for one unknown here.
        """
        return next((member for member in cls if member == code), cls.WORKER_REFUSED)

    # The request.
    INVALID_REQUEST = "invalid_request", 422, "INVALID_ARGUMENT"
    MALFORMED_JSON = "malformed_json", 400, "INVALID_ARGUMENT"
    MALFORMED_MESSAGE = "malformed_message", 400, "INVALID_ARGUMENT"
    UNSUPPORTED_ENCODING = "unsupported_encoding", 415, "INVALID_ARGUMENT"
    BODY_TOO_LARGE = "body_too_large", 413, "OUT_OF_RANGE"
    BODY_TIMEOUT = "body_timeout", 408, "DEADLINE_EXCEEDED"
    LIMIT_EXCEEDED = "limit_exceeded", 422, "INVALID_ARGUMENT"
    TURN_TOO_LONG = "turn_too_long", 413, "OUT_OF_RANGE"
    BUDGET_OUT_OF_RANGE = "budget_out_of_range", 422, "INVALID_ARGUMENT"
    UNKNOWN_METHOD = "unknown_method", 422, "INVALID_ARGUMENT"
    UNKNOWN_MODEL = "unknown_model", 422, "INVALID_ARGUMENT"
    EMPTY_TURN = "empty_turn", 422, "INVALID_ARGUMENT"
    DUPLICATE_CALL = "duplicate_call", 422, "INVALID_ARGUMENT"
    EPISODES_UNSUPPORTED = "episodes_unsupported", 422, "INVALID_ARGUMENT"
    BAD_SETTINGS = "bad_settings", 422, "INVALID_ARGUMENT"
    BAD_MESSAGES = "bad_messages", 422, "INVALID_ARGUMENT"
    NOT_COMPARABLE = "not_comparable", 422, "FAILED_PRECONDITION"

    # Who sends it.
    INVALID_API_KEY = "invalid_api_key", 401, "UNAUTHENTICATED"
    INSUFFICIENT_SCOPE = "insufficient_scope", 403, "PERMISSION_DENIED"
    WRONG_HOST = "wrong_host", 421, "INVALID_ARGUMENT"
    WRONG_ORIGIN = "wrong_origin", 403, "PERMISSION_DENIED"

    # What the request names is not there.
    UNKNOWN_SESSION = "unknown_session", 404, "NOT_FOUND"
    UNKNOWN_CALL = "unknown_call", 404, "NOT_FOUND"
    UNKNOWN_TURN = "unknown_turn", 404, "NOT_FOUND"
    UNKNOWN_EPISODE = "unknown_episode", 500, "INTERNAL"
    UNKNOWN_MESSAGE = "unknown_message", 404, "NOT_FOUND"
    UNKNOWN_RESPONSE = "unknown_response", 404, "NOT_FOUND"
    UNKNOWN_CONVERSATION = "unknown_conversation", 404, "NOT_FOUND"
    UNKNOWN_ITEM = "unknown_item", 404, "NOT_FOUND"
    DATA_KEY_DELETED = "data_key_deleted", 404, "NOT_FOUND"
    UNKNOWN_ROUTE = "unknown_route", 404, "UNIMPLEMENTED"
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "UNIMPLEMENTED"

    # The session's state.
    TOOL_RESULT_WITHOUT_CALL = "tool_result_without_call", 409, "FAILED_PRECONDITION"
    CALLS_OUTSTANDING = "calls_outstanding", 409, "FAILED_PRECONDITION"
    RESULT_CONFLICT = "result_conflict", 409, "FAILED_PRECONDITION"
    SESSION_BUSY = "session_busy", 409, "ABORTED"
    SESSION_MISMATCH = "session_mismatch", 409, "FAILED_PRECONDITION"
    STALE_EPOCH = "stale_epoch", 409, "FAILED_PRECONDITION"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict", 409, "FAILED_PRECONDITION"
    ILLEGAL_TRANSITION = "illegal_transition", 500, "INTERNAL"

    # Limits and load.
    QUOTA_EXCEEDED = "quota_exceeded", 429, "RESOURCE_EXHAUSTED"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded", 429, "RESOURCE_EXHAUSTED"
    OVERLOADED = "overloaded", 429, "RESOURCE_EXHAUSTED"
    SHUTTING_DOWN = "shutting_down", 503, "UNAVAILABLE"

    # Workers.
    WORKER_REFUSED = "worker_refused", 422, "FAILED_PRECONDITION"
    WORKER_UNAVAILABLE = "worker_unavailable", 409, "FAILED_PRECONDITION"
    WORKER_LOST = "worker_lost", 503, "UNAVAILABLE"
    TURN_QUARANTINED = "turn_quarantined", 503, "UNAVAILABLE"
    WORKER_ERROR = "worker_error", 500, "UNKNOWN"
    SESSION_NOT_OPEN = "session_not_open", 503, "NOT_FOUND"
    ROWS_MISSING = "rows_missing", 503, "DATA_LOSS"
    STORAGE_FAILED = "storage_failed", 503, "DATA_LOSS"
    CANCELLED = "cancelled", 503, "ABORTED"
    INCOMPATIBLE_STATE = "incompatible_state", 503, "FAILED_PRECONDITION"
    BAD_EPISODE = "bad_episode", 422, "INVALID_ARGUMENT"
    MODEL_REFUSED = "model_refused", 422, "FAILED_PRECONDITION"
    PROFILE_REFUSED = "profile_refused", 422, "FAILED_PRECONDITION"
    EMBEDDER_REFUSED = "embedder_refused", 422, "FAILED_PRECONDITION"
    EMBEDDING_REFUSED = "embedding_refused", 500, "INTERNAL"
    CATALOG_MISMATCH = "catalog_mismatch", 503, "FAILED_PRECONDITION"
    CANNOT_LISTEN = "cannot_listen", 500, "INTERNAL"

    # Catalog and registry.
    CATALOG_ERROR = "catalog_error", 503, "UNAVAILABLE"
    STORAGE_FULL = "storage_full", 507, "RESOURCE_EXHAUSTED"
    CHANGED_MEANWHILE = "changed_meanwhile", 503, "ABORTED"
    CATALOG_VERSION = "catalog_version", 503, "UNAVAILABLE"
    CATALOG_REPLACED = "catalog_replaced", 503, "FAILED_PRECONDITION"
    REGISTRY_ERROR = "registry_error", 500, "INTERNAL"

    # Anything else.
    SERVICE_ERROR = "service_error", 500, "INTERNAL"
    INTERNAL_ERROR = "internal_error", 500, "INTERNAL"
    HTTP_ERROR = "http_error", 500, "INTERNAL"
