"""Reads of the SQLite catalog on a connection of their own, beside the writer's."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvrecall.domain.errors import CatalogError, CatalogReplaced
from services.catalog.sqlite.storage.file import FileIdentity

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]

_WAIT_MILLISECONDS = 5_000


@dataclass(frozen=True)
class _Read:
    """A query and the future of its result."""

    query: Query[Any]
    result: "asyncio.Future[Any]"


class SnapshotReader:
    """A connection that only reads, on one thread.

    A query is a plain function that runs on that thread as a whole: one hop between threads instead
    of one per statement. It sees one snapshot, with all that was committed before, and does not
    wait for a commit that is being synced. Queries that arrive while others run share the next hop.
    """

    def __init__(self, path: Path, identity: FileIdentity) -> None:
        self._identity = identity
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute(f"PRAGMA busy_timeout={_WAIT_MILLISECONDS}")
        self._connection.execute("PRAGMA query_only=ON")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="catalog-reader")
        self._waiting: list[_Read] = []
        self._running = False
        self._closed = False

    async def read(self, query: Query[T]) -> T:
        """Run a query in one snapshot. Raises CatalogError, CatalogReplaced, and what the query raises."""
        loop = asyncio.get_running_loop()
        read = _Read(query, loop.create_future())
        self._waiting.append(read)
        if not self._running:
            self._start(loop)
        try:
            result: T = await read.result
        except (sqlite3.Error, ValueError) as error:
            raise CatalogError(f"the catalog could not be read: {error}") from error
        return result

    async def close(self) -> None:
        """Finish the queries that were asked for and close the connection."""
        if self._closed:
            return
        await self.read(lambda db: None)
        self._closed = True
        self._thread.shutdown()
        self._connection.close()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._running = True
        self._thread.submit(self._run, loop, batch)

    def _run(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Read]) -> None:
        outcomes = self._run_queries([read.query for read in batch])
        loop.call_soon_threadsafe(self._deliver, loop, batch, outcomes)

    def _run_queries(self, queries: Sequence[Query[Any]]) -> list[Any]:
        """Run queries in one snapshot; return each one's result, or its exception."""
        try:
            self._identity.require()
            self._connection.execute("BEGIN")
        except (sqlite3.Error, CatalogReplaced) as error:
            return [error] * len(queries)
        try:
            return [self._run_query(query) for query in queries]
        finally:
            self._connection.execute("ROLLBACK")

    def _run_query(self, query: Query[Any]) -> Any:
        try:
            return query(self._connection)
        except Exception as error:  # raised to the one who asked
            return error

    def _deliver(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Read], outcomes: Sequence[Any]
    ) -> None:
        self._running = False
        if self._waiting:
            self._start(loop)
        for read, outcome in zip(batch, outcomes, strict=True):
            if read.result.done():
                continue  # cancelled
            if isinstance(outcome, Exception):
                read.result.set_exception(outcome)
            else:
                read.result.set_result(outcome)
