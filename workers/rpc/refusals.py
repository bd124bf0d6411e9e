"""The end of a call that fails: a refusal of this call alone, whatever the worker met in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from workers.errors import JobFailed, WorkerError

_log = structlog.get_logger("kvrecall.calls")


@contextmanager
def refusing() -> Iterator[None]:
    """Raise an error that no one expected as JobFailed: its text goes to the log, not to clients."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        _log.exception("call failed")
        raise JobFailed(
            f"the worker met an error that it did not expect ({type(error).__name__}) and goes on "
            "without this request, which may fail again; its log has the traceback: call failed"
        ) from error
