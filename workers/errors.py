"""What can go wrong in a worker. `code` is stable and crosses the wire; the message is for people."""


class WorkerError(Exception):
    """Base of all errors of this package."""

    code = "worker_error"


class ModelRefused(WorkerError):
    """The model cannot be served as it is: its layers, cache or files are of a kind that rows cannot describe."""

    code = "model_refused"


class EmbedderRefused(WorkerError):
    """The sentence encoder cannot be loaded."""

    code = "embedder_refused"


class BadEpisode(WorkerError):
    """An episode does not fit its session: other layers or heads, rows that the session does not have, too many."""

    code = "bad_episode"


class UnknownMethod(WorkerError):
    """No eviction method of that name is registered."""

    code = "unknown_method"


class BadSettings(WorkerError):
    """A method's settings, a session's budget or a sampling value is outside its range."""

    code = "bad_settings"


class ProfileRefused(WorkerError):
    """A profile of the model's layers cannot be measured, or the file is not one of this model's."""

    code = "profile_refused"


class UnknownSession(WorkerError):
    """The session is not open in this worker."""

    code = "unknown_session"


class StaleEpoch(WorkerError):
    """The request carries an epoch older than the session's: its sender lost the session meanwhile."""

    code = "stale_epoch"


class TurnTooLong(WorkerError):
    """The turn would take the session past the model's context or, without eviction, past its slot."""

    code = "turn_too_long"


class BadMessages(WorkerError):
    """The chat template cannot render these messages."""

    code = "bad_messages"


class RowsMissing(WorkerError):
    """Rows that were committed are not in the row store, or not readable."""

    code = "rows_missing"


class StorageFailed(WorkerError):
    """The row store could not read or write."""

    code = "storage_failed"


class NotComparable(WorkerError):
    """The session to compare with kept no distribution of the same recorded tokens."""

    code = "not_comparable"


class Overloaded(WorkerError):
    """Every slot is held by a running turn and the queue is full."""

    code = "overloaded"


class Cancelled(WorkerError):
    """The turn was cancelled, or the worker is closing."""

    code = "cancelled"


class CannotListen(WorkerError):
    """The worker's server cannot have its address, or its certificates cannot be used."""

    code = "cannot_listen"
