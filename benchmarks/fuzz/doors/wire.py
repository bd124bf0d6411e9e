"""Checks of replies of a worker's own port, with and without the token of its gateways."""

from benchmarks.fuzz.findings import Problem
from benchmarks.fuzz.replies import Checker
from benchmarks.fuzz.requests import Reply, Request
from kvrecall.domain.codes import ErrorCode

_CHECKER = Checker()
# A worker is asked about sessions that it never had, and its calls are left after a while.
_EXPECTED = frozenset(
    {ErrorCode.SESSION_NOT_OPEN, ErrorCode.ROWS_MISSING, ErrorCode.CATALOG_MISMATCH}
)


def check_refused(request: Request, reply: Reply) -> list[Problem]:
    """Return a problem unless a call without the token was refused for that."""
    if reply.status == "UNAUTHENTICATED":
        return []
    return [Problem(f"{reply.status} without a token", reply.body[:300].decode("utf-8", "replace"))]


def check_worker_call(request: Request, reply: Reply) -> list[Problem]:
    """Return what is wrong with the end of a call with the token."""
    if reply.code in _EXPECTED or reply.status == "DEADLINE_EXCEEDED":
        return []
    return _CHECKER.check_call(request, reply)
