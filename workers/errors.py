"""Errors of a worker. `code` is stable and crosses the wire; the message is for people."""

from kvrecall.domain.codes import ErrorCode


class WorkerError(Exception):
    """Base of all errors of this package."""

    code: ErrorCode = ErrorCode.WORKER_ERROR


class MalformedMessage(WorkerError):
    """The bytes of a request are none of its message."""

    code = ErrorCode.MALFORMED_MESSAGE


class ModelRefused(WorkerError):
    """The model cannot be served: rows cannot describe its layers, cache or files."""

    code = ErrorCode.MODEL_REFUSED


class EmbedderRefused(WorkerError):
    """The sentence encoder cannot be loaded."""

    code = ErrorCode.EMBEDDER_REFUSED


class BadEpisode(WorkerError):
    """An episode does not fit its session: other layers or heads, unknown rows, or too many."""

    code = ErrorCode.BAD_EPISODE


class UnknownMethod(WorkerError):
    """No eviction method of that name is registered."""

    code = ErrorCode.UNKNOWN_METHOD


class BadSettings(WorkerError):
    """A method's settings, a session's budget or a sampling value is outside its range."""

    code = ErrorCode.BAD_SETTINGS


class ProfileRefused(WorkerError):
    """A profile of the model's layers cannot be measured, or the file is of another model."""

    code = ErrorCode.PROFILE_REFUSED


class UnknownSession(WorkerError):
    """The session is not open in this worker."""

    code = ErrorCode.SESSION_NOT_OPEN


class StaleEpoch(WorkerError):
    """The request's epoch is older than the session's: its sender has lost the session."""

    code = ErrorCode.STALE_EPOCH


class IncompatibleState(WorkerError):
    """A session's state is in a form that this worker cannot read: a newer worker's, or a damaged one."""

    code = ErrorCode.INCOMPATIBLE_STATE


class TurnTooLong(WorkerError):
    """The turn would exceed the model's context or, without eviction, the session's slot."""

    code = ErrorCode.TURN_TOO_LONG


class BadMessages(WorkerError):
    """The chat template cannot render these messages."""

    code = ErrorCode.BAD_MESSAGES


class RowsMissing(WorkerError):
    """Rows that were committed are not in the row store, or not readable."""

    code = ErrorCode.ROWS_MISSING


class StorageFailed(WorkerError):
    """The row store could not read or write."""

    code = ErrorCode.STORAGE_FAILED


class NotComparable(WorkerError):
    """The session to compare with has no distribution of the same recorded tokens."""

    code = ErrorCode.NOT_COMPARABLE


class Overloaded(WorkerError):
    """All slots are busy and the queue is full."""

    code = ErrorCode.OVERLOADED


class Cancelled(WorkerError):
    """The turn was cancelled, or the worker is closing."""

    code = ErrorCode.CANCELLED


class JobFailed(WorkerError):
    """A job met an error that no one expected. It ends that job alone: the worker goes on."""

    code = ErrorCode.WORKER_ERROR


class CatalogMismatch(WorkerError):
    """The worker's pages belong to the sessions of another catalog than the gateway's."""

    code = ErrorCode.CATALOG_MISMATCH


class CannotListen(WorkerError):
    """The server cannot bind its address, or cannot use its certificates."""

    code = ErrorCode.CANNOT_LISTEN
