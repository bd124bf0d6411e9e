"""Group commit: sessions that wait at the same time share one wait for the disks."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread
from typing import TypeVar

from kvstore.errors import StoreClosedError
from kvstore.format.page import PageId

_T = TypeVar("_T")
_R = TypeVar("_R")

Group = Collection[PageId]
"""Pages that one caller waits for."""


@dataclass(frozen=True, eq=False)
class _Request:
    """Pages to commit, or with `durable` None, to keep."""

    pages: Group
    durable: "Future[bool] | None"


class GroupCommit:
    """Commits groups of pages in a thread of its own, all that wait by then at once.

    `commit(groups)` returns per group whether all its pages are durable; its error reaches every
    group. `keep(pages)` renews pages' time to live, after the waiting callers have their answers.
    """

    def __init__(
        self, commit: Callable[[Sequence[Group]], list[bool]], keep: Callable[[Group], None]
    ) -> None:
        self._commit = commit
        self._keep = keep
        self._changed = Condition()
        self._waiting: list[_Request] = []
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-group-commit", daemon=True)
        self._thread.start()

    def submit(self, pages: Group) -> "Future[bool]":
        """Commit submitted pages; True once they are durable. Raises StoreClosedError after `close`."""
        durable = Future[bool]()
        durable.set_running_or_notify_cancel()
        self._add(_Request(pages, durable))
        return durable

    def renew(self, pages: Group) -> None:
        """Renew the pages' time to live in the background."""
        self._add(_Request(pages, None))

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
            self._serve(
                [(each.pages, each.durable) for each in requests if each.durable is not None]
            )
            if kept := {page for each in requests if each.durable is None for page in each.pages}:
                self._keep(kept)

    def _take(self) -> list[_Request]:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            requests, self._waiting = self._waiting, []
            return requests

    def _serve(self, requests: "Sequence[tuple[Group, Future[bool]]]") -> None:
        if not requests:
            return
        try:
            results = self._commit([pages for pages, _ in requests])
        except Exception as error:  # The thread must survive, and every waiter must learn of it.
            for _, durable in requests:
                durable.set_exception(error)
            return
        for (_, durable), result in zip(requests, results, strict=True):
            durable.set_result(result)


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
