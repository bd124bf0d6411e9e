"""Group commit: sessions that wait at the same time share one wait for the disks."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import TypeVar

from kvstore.errors import StoreClosedError

_T = TypeVar("_T")
_R = TypeVar("_R")

Group = Collection[str]
"""Sessions whose pages one caller waits for."""


@dataclass(frozen=True, eq=False)
class _Request:
    sessions: Group
    keep_alive: Group
    durable: "Future[bool]" = field(default_factory=Future)


class GroupCommit:
    """Commits groups of sessions in a thread of its own, all that wait by then at once.

    `commit(groups)` returns per group whether all pages submitted before are durable; its error
    reaches every group. `touch(session)` renews a session's time to live, after the waiting callers
    have their answers.
    """

    def __init__(
        self, commit: Callable[[Sequence[Group]], list[bool]], touch: Callable[[str], None]
    ) -> None:
        self._commit = commit
        self._touch = touch
        self._changed = Condition()
        self._waiting: list[_Request] = []
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-group-commit", daemon=True)
        self._thread.start()

    def submit(self, sessions: Group) -> "Future[bool]":
        """Commit what was submitted of these sessions, and renew them; True once it is durable.

        Raises StoreClosedError after `close`.
        """
        request = _Request(sessions, keep_alive=sessions)
        request.durable.set_running_or_notify_cancel()
        self._add(request)
        return request.durable

    def renew(self, sessions: Group) -> None:
        """Renew the sessions' time to live in the background."""
        self._add(_Request((), keep_alive=sessions))

    def close(self) -> None:
        """Finish all requests and stop the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _add(self, request: _Request) -> None:
        with self._changed:
            if self._closed:
                raise StoreClosedError("the row store is closed")
            self._waiting.append(request)
            self._changed.notify()

    def _run(self) -> None:
        while requests := self._take():
            self._serve([request for request in requests if request.sessions])
            for session in {name for request in requests for name in request.keep_alive}:
                self._touch(session)

    def _take(self) -> list[_Request]:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            requests, self._waiting = self._waiting, []
            return requests

    def _serve(self, requests: Sequence[_Request]) -> None:
        if not requests:
            return
        try:
            results = self._commit([request.sessions for request in requests])
        except Exception as error:  # The thread must survive, and every waiter must learn of it.
            for request in requests:
                request.durable.set_exception(error)
            return
        for request, durable in zip(requests, results, strict=True):
            request.durable.set_result(durable)


def then(source: "Future[_T]", finish: Callable[[_T], _R]) -> "Future[_R]":
    """A future for `finish` of the source's result, run by the thread that sets it."""
    result = Future[_R]()
    result.set_running_or_notify_cancel()

    def copy(done: "Future[_T]") -> None:
        try:
            result.set_result(finish(done.result()))
        except Exception as error:
            result.set_exception(error)

    source.add_done_callback(copy)
    return result
