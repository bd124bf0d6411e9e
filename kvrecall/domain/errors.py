"""The exceptions of the service. `code` is stable and public; the message is for people."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvrecall.domain.codes import ErrorCode


class ServiceError(Exception):
    """Base of all errors of this package.

    `details` holds plain JSON values that a client may act on: the field, the limit, the calls that
    are meant.
    """

    code: ErrorCode = ErrorCode.SERVICE_ERROR

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class InvalidRequest(ServiceError):
    """A field of the request cannot be accepted; nothing was changed."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, field: str, message: str, **details: object) -> None:
        super().__init__(message, field=field, **details)


class LimitExceeded(InvalidRequest):
    """A field is over (or under) a limit of this service."""

    code = ErrorCode.LIMIT_EXCEEDED

    def __init__(self, field: str, message: str, limit: int) -> None:
        super().__init__(field, message, limit=limit)


class TurnTooLong(LimitExceeded):
    """The messages of a turn are more or larger than one turn may bring."""

    code = ErrorCode.TURN_TOO_LONG


class ContextExceeded(TurnTooLong):
    """A conversation has more tokens than its session may have: the model's context, say."""

    def __init__(self, field: str, tokens: int, limit: int, advice: str = "") -> None:
        message = f"the conversation has {tokens} tokens; its session ends at {limit}{advice}"
        super().__init__(field, message, limit)
        self.details["tokens"] = tokens


class BudgetOutOfRange(LimitExceeded):
    """The budget is under the sinks and the window, or over what a slot holds."""

    code = ErrorCode.BUDGET_OUT_OF_RANGE


class UnknownMethod(InvalidRequest):
    """The worker has no eviction method of that name."""

    code = ErrorCode.UNKNOWN_METHOD


class BadSettings(InvalidRequest):
    """A setting of the method is unknown or out of its range; `field` is its path."""

    code = ErrorCode.BAD_SETTINGS


class UnknownModel(InvalidRequest):
    """The worker does not serve that model."""

    code = ErrorCode.UNKNOWN_MODEL


class EmptyTurn(InvalidRequest):
    """The turn has no message, and no tool result waits to be appended."""

    code = ErrorCode.EMPTY_TURN


class ToolResultWithoutCall(InvalidRequest):
    """A tool message answers a call that does not exist or already has its result."""

    code = ErrorCode.TOOL_RESULT_WITHOUT_CALL


class DuplicateCall(InvalidRequest):
    """Two tool calls of one assistant message share an id."""

    code = ErrorCode.DUPLICATE_CALL


class CallsOutstanding(ServiceError):
    """The turn would go on while tool calls still wait for their results."""

    code = ErrorCode.CALLS_OUTSTANDING

    def __init__(self, calls: list[str]) -> None:
        super().__init__(
            f"tool calls without a result: {', '.join(calls)}; send tool_call.completed or tool_call.failed events, "
            "or tool messages for all of them first",
            calls=calls,
        )
        self.calls = tuple(calls)


class ResultConflict(ServiceError):
    """A tool call has another result already."""

    code = ErrorCode.RESULT_CONFLICT


class Unauthenticated(ServiceError):
    """The request has no key, or one that is unknown, expired or revoked."""

    code = ErrorCode.INVALID_API_KEY


class InsufficientScope(ServiceError):
    """The key has none of the scopes that the request needs."""

    code = ErrorCode.INSUFFICIENT_SCOPE

    def __init__(self, scopes: Sequence[str]) -> None:
        super().__init__(f"the key lacks the scope {' or '.join(scopes)}", scopes=list(scopes))


class WrongHost(ServiceError):
    """The request names the service by a name that is not its own."""

    code = ErrorCode.WRONG_HOST


class WrongOrigin(ServiceError):
    """The request is a write by a web page of another origin."""

    code = ErrorCode.WRONG_ORIGIN


class UnknownSession(ServiceError):
    """There is no session of that id."""

    code = ErrorCode.UNKNOWN_SESSION

    def __init__(self, session: str) -> None:
        super().__init__(f"there is no session {session!r}", session=session)


class UnknownTurn(ServiceError):
    """The session has no turn of that number."""

    code = ErrorCode.UNKNOWN_TURN

    def __init__(self, session: str, turn: int) -> None:
        super().__init__(f"session {session!r} has no turn {turn}", session=session, turn=turn)


class QuotaExceeded(ServiceError):
    """A tenant's sessions hold as much as they may."""

    code = ErrorCode.QUOTA_EXCEEDED

    def __init__(self, message: str, limit: int, what: str) -> None:
        """`what` is limited, in the plural: sessions, bytes."""
        super().__init__(message, limit=limit)
        self.what = what


class UnknownCall(ServiceError):
    """The session made no tool call of that id."""

    code = ErrorCode.UNKNOWN_CALL

    def __init__(self, session: str, call: str) -> None:
        super().__init__(
            f"session {session!r} made no tool call {call!r}", session=session, call=call
        )


class DataKeyDeleted(ServiceError):
    """A value is encrypted under a data key that its tenant has no more."""

    code = ErrorCode.DATA_KEY_DELETED

    def __init__(self) -> None:
        super().__init__(
            "the tenant's data key was deleted, so this can no longer be decrypted; begin a new session"
        )


class UnknownEpisode(ServiceError):
    """The session has no episode of that id; it was rebuilt since."""

    code = ErrorCode.UNKNOWN_EPISODE

    def __init__(self, session: str, episode: str) -> None:
        super().__init__(
            f"session {session!r} has no episode {episode!r}", session=session, episode=episode
        )


class UnknownMessage(ServiceError):
    """There is no message of that id to go on from, or not any more."""

    code = ErrorCode.UNKNOWN_MESSAGE

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"there is no message {message_id!r} to go on from", field="thread.previous_message_id"
        )


class UnknownResponse(ServiceError):
    """There is no stored response of that id, or not any more."""

    code = ErrorCode.UNKNOWN_RESPONSE

    def __init__(self, response: str) -> None:
        super().__init__(f"there is no response {response!r}", response=response)


class UnknownConversation(ServiceError):
    """There is no conversation of that id."""

    code = ErrorCode.UNKNOWN_CONVERSATION

    def __init__(self, conversation: str) -> None:
        super().__init__(f"there is no conversation {conversation!r}", conversation=conversation)


class UnknownItem(ServiceError):
    """The conversation has no item of that id."""

    code = ErrorCode.UNKNOWN_ITEM

    def __init__(self, item: str) -> None:
        super().__init__(f"there is no item {item!r}", item=item)


class EpisodesUnsupported(InvalidRequest):
    """Episodes were asked for with a method whose evictions do not look at them."""

    code = ErrorCode.EPISODES_UNSUPPORTED


class EmbeddingRefused(ServiceError):
    """The encoder's vectors do not fit those that the session's episodes were made from."""

    code = ErrorCode.EMBEDDING_REFUSED


class SessionBusy(ServiceError):
    """Another request writes the session, and this one did not ask to wait, or waited too long."""

    code = ErrorCode.SESSION_BUSY


class SessionMismatch(ServiceError):
    """A session that the client names holds another conversation than the request says."""

    code = ErrorCode.SESSION_MISMATCH


class IllegalTransition(ServiceError):
    """An event that the session's state does not allow: a broken invariant of the service."""

    code = ErrorCode.ILLEGAL_TRANSITION


class IdempotencyConflict(ServiceError):
    """The idempotency key was used for another request."""

    code = ErrorCode.IDEMPOTENCY_CONFLICT

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the idempotency key {key!r} was used for another request; take a fresh key", key=key
        )


class Overloaded(ServiceError):
    """As much waits as may wait; come again later."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RateLimited(Overloaded):
    """The key or the tenant has used up its rate for now."""

    code = ErrorCode.RATE_LIMIT_EXCEEDED


class ShuttingDown(Overloaded):
    """The service is finishing what it acknowledged and takes nothing new."""

    code = ErrorCode.SHUTTING_DOWN


class TurnQuarantined(Overloaded):
    """The turn lost several workers, which it may have killed; it is refused for a while."""

    code = ErrorCode.TURN_QUARANTINED


class StaleEpoch(ServiceError):
    """Another process took the session over; this one may not write it any more."""

    code = ErrorCode.STALE_EPOCH


class CatalogError(ServiceError):
    """The catalog could not be opened, read or written."""

    code = ErrorCode.CATALOG_ERROR


class CatalogUnreachable(CatalogError):
    """The catalog does not answer: every call fails so, until it does."""


class StorageFull(CatalogError):
    """The catalog's disk or memory is nearly full: it stores no more until something is deleted."""

    code = ErrorCode.STORAGE_FULL


class CatalogVersion(CatalogError):
    """The catalog was written by another version of its schema."""

    code = ErrorCode.CATALOG_VERSION


class CatalogReplaced(CatalogError):
    """Where the catalog was, there is none or another one: its data are lost, or somewhere else."""

    code = ErrorCode.CATALOG_REPLACED


class ManyUnknownPages(CatalogError):
    """No session has so many of a worker's pages that the catalog may have lost their sessions."""

    def __init__(self, worker: str, unknown: int, listed: int) -> None:
        super().__init__(
            f"no session has {unknown} of the {listed} pages of worker {worker!r}, more than crashes "
            "leave: the catalog may have lost their sessions, so nothing is deleted. Restore the "
            "catalog, or, if these pages are to go, start the gateways once with "
            "KVRECALL_SERVICE__MAX_UNKNOWN_SHARE=1"
        )


FIELD_OF_REFUSAL: Mapping[ErrorCode, str] = MappingProxyType(
    {
        ErrorCode.TURN_TOO_LONG: "messages",
        ErrorCode.BAD_MESSAGES: "messages",
        ErrorCode.NOT_COMPARABLE: "logprobs.compare_with",
    }
)


class WorkerRefused(ServiceError):
    """The worker cannot serve the request as it stands, and has changed nothing.

    The code gives the reason.

    When the code identifies a field of the request, `details` names it: only the worker can count
    tokens, but a client sees the same problem as for fields that are checked earlier.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        field = FIELD_OF_REFUSAL.get(code)
        super().__init__(message, **({"field": field} if field else {}))
        self.code = code


class RegistryError(ServiceError):
    """The list of workers cannot be read now."""

    code = ErrorCode.REGISTRY_ERROR


class WorkerUnavailable(ServiceError):
    """The worker that was asked for takes no session now."""

    code = ErrorCode.WORKER_UNAVAILABLE


class WorkerLost(ServiceError):
    """The worker is gone or broken."""

    code = ErrorCode.WORKER_LOST
