"""The catalog on SQLite: one file, write-ahead log, every commit synced to the disk before it is acknowledged.

One process owns the file, so who works on a session now is kept in its memory. That process may have several workers.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiosqlite

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.base import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    KnownPrefix,
    Lease,
    OrphanedPages,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
    SegmentsCommit,
    SessionDump,
    SessionPage,
    TurnCommit,
)
from services.catalog.claims import Claims
from services.catalog.sqlite import episodes, sessions
from services.catalog.sqlite import idempotency as answers
from services.catalog.sqlite import page_refs as sharing
from services.catalog.sqlite import tool_calls as pauses
from services.catalog.sqlite.copies import restore
from services.catalog.sqlite.database import open_file
from services.catalog.sqlite.forks import fork
from services.catalog.sqlite.statements import check_session, fence

T = TypeVar("T")
Work = Callable[[aiosqlite.Connection], Awaitable[T]]


class SqliteCatalog:
    """A `Catalog` in one SQLite file. Statements of one transaction are never mixed with another's."""

    def __init__(self, connection: aiosqlite.Connection, answers: int) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._answers = answers
        self._claims = Claims()

    @classmethod
    async def open(cls, path: Path, idempotency_records: int = 10_000) -> "SqliteCatalog":
        """Open or create the catalog at `path`, keeping at most that many idempotent answers.

        Raises CatalogVersion for a file of another version, CatalogError when it cannot be opened or is no catalog.
        """
        return cls(await open_file(path), idempotency_records)

    async def close(self) -> None:
        """Finish running writes and close the file."""
        async with self._turn:
            await self._connection.close()

    async def create(
        self, session: Session, worker_state: bytes, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.create`."""
        await self._write(
            lambda db: sessions.add(db, session, worker_state), answer, made=session.id
        )

    async def session(self, session: str) -> Session:
        """See `Catalog.session`."""
        return await self._read(lambda db: sessions.read(db, session))

    async def worker_state(self, session: str) -> bytes:
        """See `Catalog.worker_state`."""
        return await self._read(lambda db: sessions.read_state(db, session))

    async def page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """See `Catalog.page`."""
        return await self._read(lambda db: sessions.read_page(db, limit, cursor, tenant))

    async def session_ids(self) -> list[str]:
        """See `Catalog.session_ids`."""
        return await self._read(sessions.read_ids)

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """See `Catalog.turns`."""
        return await self._read(lambda db: sessions.read_turns(db, session, after, limit))

    async def token_ids(self, session: str) -> tuple[int, ...]:
        """See `Catalog.token_ids`."""
        return await self._read(lambda db: sessions.read_tokens(db, session))

    async def repairs(self, session: str, limit: int) -> list[RepairRecord]:
        """See `Catalog.repairs`."""

        async def read(db: aiosqlite.Connection) -> list[RepairRecord]:
            await check_session(db, session)
            return await pauses.read_repairs(db, session, limit)

        return await self._read(read)

    async def claim(self, session: str, holder: str, seconds: float) -> Lease:
        """See `Catalog.claim`."""
        found = await self.session(session)
        self._claims.take(session, holder, seconds)
        return Lease(found.epoch, found.worker)

    async def release(self, session: str, holder: str) -> None:
        """See `Catalog.release`."""
        self._claims.give_back(session, holder)

    async def take_over(self, session: str, worker: str) -> int:
        """See `Catalog.take_over`."""
        return await self._write(lambda db: sessions.take_over(db, session, worker))

    async def fork(self, commit: ForkCommit, answer: IdempotencyRecord | None) -> None:
        """See `Catalog.fork`."""
        await self._write(lambda db: fork(db, commit), answer, made=commit.session.id)

    async def restore(self, dump: SessionDump) -> None:
        """See `Catalog.restore`."""
        await self._write(lambda db: restore(db, dump))

    async def share(self, session: str, shared: SharedPages) -> bool:
        """See `Catalog.share`."""
        return await self._write(lambda db: sharing.promise(db, session, shared))

    async def prefix(self, digest: str) -> KnownPrefix | None:
        """See `Catalog.prefix`."""
        return await self._read(lambda db: sharing.read_prefix(db, digest))

    async def kept_pages(self) -> list[SharedPages]:
        """See `Catalog.kept_pages`."""
        return await self._read(sharing.read_kept)

    async def tenant_tokens(self, tenant: str) -> int:
        """See `Catalog.tenant_tokens`."""
        return await self._read(lambda db: sessions.read_length(db, tenant))

    async def commit_turn(
        self, commit: TurnCommit, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.commit_turn`."""
        await self._write(lambda db: sessions.add_turn(db, commit, epoch), answer)

    async def commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        """See `Catalog.commit_repair`."""
        await self._write(lambda db: sessions.add_repair(db, session, commit, epoch))

    async def call(self, session: str, call: str) -> PendingCall:
        """See `Catalog.call`."""
        return await self._read(lambda db: sessions.read_call(db, session, call))

    async def commit_call(
        self, session: str, call: PendingCall, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.commit_call`."""
        await self._fenced(
            session, epoch, lambda db: pauses.write_report(db, session, call), answer
        )

    async def silent(self, since: float) -> list[str]:
        """See `Catalog.silent`."""
        return await self._read(lambda db: pauses.silent(db, since))

    async def episodes(self, session: str) -> EpisodeSet:
        """See `Catalog.episodes`."""

        async def read(db: aiosqlite.Connection) -> EpisodeSet:
            await check_session(db, session)
            return await episodes.read_set(db, session)

        return await self._read(read)

    async def segments(self, session: str) -> list[SegmentRecord]:
        """See `Catalog.segments`."""
        return await self._read(lambda db: episodes.read_segments(db, session))

    async def built_episode(self, session: str, episode: str) -> bytes:
        """See `Catalog.built_episode`."""
        return await self._read(lambda db: episodes.read_built(db, session, episode))

    async def commit_segments(self, session: str, commit: SegmentsCommit, epoch: int) -> None:
        """See `Catalog.commit_segments`."""
        await self._fenced(session, epoch, lambda db: episodes.add_segments(db, session, commit))

    async def commit_build(self, session: str, commit: BuildCommit, epoch: int) -> None:
        """See `Catalog.commit_build`."""
        await self._fenced(
            session, epoch, lambda db: episodes.replace_episodes(db, session, commit)
        )

    async def forget_episodes(self, session: str, epoch: int) -> None:
        """See `Catalog.forget_episodes`."""
        await self._fenced(session, epoch, lambda db: episodes.forget(db, session))

    async def delete(self, session: str, answer: IdempotencyRecord | None) -> list[OrphanedPages]:
        """See `Catalog.delete`."""
        leftovers = await self._write(lambda db: sharing.delete(db, session), answer)
        self._claims.forget(session)
        return leftovers

    async def leftovers(self) -> list[OrphanedPages]:
        """See `Catalog.leftovers`."""
        return await self._read(sharing.read_leftovers)

    async def dropped(self, leftover: OrphanedPages) -> None:
        """See `Catalog.dropped`."""
        await self._write(lambda db: sharing.forget_leftover(db, leftover))

    async def recall(self, key: IdempotencyKey) -> str | None:
        """See `Catalog.recall`."""
        return await self._read(lambda db: answers.recall(db, key))

    async def _read(self, work: Work[T]) -> T:
        async with self._turn:
            try:
                return await work(self._connection)
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be read: {error}") from error

    async def _fenced(
        self, session: str, epoch: int, work: Work[None], answer: IdempotencyRecord | None = None
    ) -> None:
        async def fenced(db: aiosqlite.Connection) -> None:
            await fence(db, session, epoch)
            await work(db)

        await self._write(fenced, answer)

    async def _write(
        self, work: Work[T], answer: IdempotencyRecord | None = None, made: str = ""
    ) -> T:
        """Run `work` and remember its answer, as one transaction that no cancellation breaks off."""

        async def write() -> T:
            async with self._transaction() as db:
                result = await work(db)
                await answers.remember(db, answer, made, self._answers)
            return result

        return await run_to_completion(write())

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._turn:
            try:
                await self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                await self._connection.execute("COMMIT")
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be written: {error}") from error
            finally:
                if self._connection.in_transaction:
                    await self._connection.execute("ROLLBACK")
