"""Threads on which tenants' work takes turns."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, TypeVar

from kvrecall.sandbox.tenant_queue import TenantQueue

Result = TypeVar("Result")


class TenantThreads:
    """A few threads for work of a size that clients choose, with a limit of pieces per tenant.

    Work that takes long keeps only its own tenant waiting, unlike in the event loop's executor.
    """

    def __init__(self, threads: int, most: int, name: str, at_once: int = 1) -> None:
        """Start no thread yet. `most`: pieces of one tenant that may wait; `at_once`: that may run."""
        self._queue: TenantQueue[tuple[Future[Any], Callable[[], Any]]] = TenantQueue(most, at_once)
        self._number = threads
        self._name = name
        self._threads: list[Thread] = []
        self._lock = Lock()

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        """Let work be done. Raises QueueFull."""
        self._start()
        done: Future[Result] = Future()
        self._queue.put(tenant, (done, work))
        return done

    def close(self) -> None:
        """End the threads; work that waits is not done."""
        for done, _ in self._queue.close():
            done.cancel()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._threads:
                return
            for number in range(self._number):
                name = f"{self._name}-{number}"
                self._threads.append(Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()

    def _serve(self) -> None:
        while (taken := self._queue.take()) is not None:
            tenant, (done, work) = taken
            try:
                if done.set_running_or_notify_cancel():
                    done.set_result(work())
            except BaseException as error:  # the submitter gets it; the thread goes on
                done.set_exception(error)
            finally:
                self._queue.finish(tenant)
