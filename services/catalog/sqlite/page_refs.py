"""References to shared pages in the SQLite catalog. The functions run in the caller's transaction.

A session references every owner in its ancestry, so the number of an owner's pages in use is one
maximum over `page_refs`, and no chain of forks is ever walked.
"""

import json
from collections.abc import Sequence

import aiosqlite

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.session import SharedPages
from services.catalog.records import CREATION_SECONDS, KnownPrefix, OrphanedPages
from services.catalog.serialization import COMMIT_POINTS, decode_tokens, encode_tokens, seal, unseal
from services.catalog.sqlite.database import Database
from services.catalog.sqlite.queries import (
    build_insert,
    fetch_all,
    fetch_one,
    fetch_value,
    insert,
    require_session,
)

# The number of earlier deletions' orphaned pages that a deletion returns beside its own.
_ORPHANED_AT_ONCE = 16
# The column `position` of a reservation.
RESERVED = -1


class SqlitePageRefs:
    """References to pages of other sessions, and pages without references."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reserve(self, session_id: str, shared: SharedPages) -> bool:
        """Reference pages before use; False if they are gone. Raises UnknownSession."""

        async def change(db: aiosqlite.Connection) -> bool:
            await require_session(db, session_id)
            if not await _exist(db, shared):
                return False
            await _add_reservation(db, session_id, shared)
            return True

        return await self._database.write(change)

    async def get_prefix(self, digest: str) -> KnownPrefix | None:
        """Return the prefix offered under this digest."""
        query = "SELECT owner, token_ids, epoch FROM prefixes WHERE digest = :digest"

        async def read(db: aiosqlite.Connection) -> KnownPrefix | None:
            row = await fetch_one(db, query, {"digest": digest})
            if row is None:
                return None
            return KnownPrefix(row["owner"], decode_tokens(unseal(row["token_ids"])), row["epoch"])

        return await self._database.read(read)

    async def get_retained(self) -> list[SharedPages]:
        """Return the deleted sessions whose pages are still referenced."""
        return await self._database.read(_read_retained)

    async def find_unknown(self, session_ids: Sequence[str]) -> list[OrphanedPages]:
        """Return those of the sessions that do not exist, with their pages that are referenced."""
        query = (
            "SELECT value AS owner, coalesce((SELECT max(pages) FROM page_refs"
            " WHERE page_refs.owner = value), 0) AS keep_pages"
            " FROM json_each(:ids) WHERE value NOT IN (SELECT id FROM sessions)"
        )
        ids = {"ids": json.dumps(list(session_ids))}
        rows = await self._database.read(lambda db: fetch_all(db, query, ids))
        return [OrphanedPages(row["owner"], row["keep_pages"]) for row in rows]

    async def begin_creation(self, session_id: str) -> None:
        """Note that workers write pages of a session before it is committed."""
        row = {"session": session_id, "since": self._database.now()}

        async def change(db: aiosqlite.Connection) -> None:
            await insert(db, "creations", [row])

        await self._database.write(change)

    async def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet."""
        now = self._database.now()

        async def read(db: aiosqlite.Connection) -> tuple[list[str], list[OrphanedPages]]:
            return await _read_abandoned(db, now), await _read_orphaned(db)

        abandoned, orphaned = await self._database.read(read)
        if not abandoned:
            return orphaned
        await self._database.write(lambda db: _orphan_abandoned(db, now))
        return await self._database.read(_read_orphaned)

    async def confirm_deleted(self, orphaned: OrphanedPages) -> None:
        """Note that these pages are deleted; a later note that keeps fewer pages stays."""

        async def change(db: aiosqlite.Connection) -> None:
            await db.execute(
                "DELETE FROM orphaned_pages WHERE owner = :owner AND keep_pages = :keep_pages",
                _to_orphaned_row(orphaned),
            )

        await self._database.write(change)


async def replace_refs(
    db: aiosqlite.Connection, session_id: str, shared: Sequence[SharedPages]
) -> None:
    """Replace the session's references and reservations; note the pages that this orphans."""
    owners = await _read_owners(db, session_id)
    await db.execute("DELETE FROM page_refs WHERE session = :session", {"session": session_id})
    rows = [
        {
            "session": session_id,
            "owner": each.owner,
            "pages": each.pages,
            "position": position,
            "history": COMMIT_POINTS.dump_json(each.history).decode(),
        }
        for position, each in enumerate(shared)
    ]
    await insert(db, "page_refs", rows)
    await _note_orphaned(db, await _find_shrunk(db, owners))


async def require_pages(db: aiosqlite.Connection, shared: Sequence[SharedPages]) -> None:
    """Check that the pages of all owners exist. Raises UnknownSession."""
    for each in shared:
        if not await _exist(db, each):
            raise UnknownSession(each.owner)


async def add_prefix(db: aiosqlite.Connection, digest: str, prefix: KnownPrefix) -> None:
    """Offer a session's first tokens, unless another session has offered some already."""
    row = {
        "digest": digest,
        "owner": prefix.owner,
        "token_ids": seal(encode_tokens(prefix.token_ids)),
        "epoch": prefix.epoch,
    }
    await db.execute(f"{build_insert('prefixes', row)} ON CONFLICT (digest) DO NOTHING", row)


async def delete_session(db: aiosqlite.Connection, session_id: str) -> list[OrphanedPages]:
    """Delete a session; return its orphaned pages, then some others. Raises UnknownSession."""
    owners = await _read_owners(db, session_id)
    query = "DELETE FROM sessions WHERE id = :session RETURNING id"
    if await fetch_one(db, query, {"session": session_id}) is None:
        raise UnknownSession(session_id)
    own = OrphanedPages(session_id, await _count_used(db, session_id))
    shrunk = await _find_shrunk(db, owners)
    await _note_orphaned(db, [own, *shrunk])
    return list(dict.fromkeys([own, *shrunk, *await _read_orphaned(db, _ORPHANED_AT_ONCE)]))


async def clear_orphaned(db: aiosqlite.Connection, owner: str) -> None:
    """Drop the notes of an owner's orphaned pages and of its creation."""
    await db.execute("DELETE FROM orphaned_pages WHERE owner = :owner", {"owner": owner})
    await db.execute("DELETE FROM creations WHERE session = :owner", {"owner": owner})


async def _add_reservation(db: aiosqlite.Connection, session_id: str, shared: SharedPages) -> None:
    row = {
        "session": session_id,
        "owner": shared.owner,
        "pages": shared.pages,
        "position": RESERVED,
    }
    await db.execute(
        f"{build_insert('page_refs', row)} ON CONFLICT (session, owner, position)"
        " DO UPDATE SET pages = max(pages, excluded.pages)",
        row,
    )


async def _exist(db: aiosqlite.Connection, shared: SharedPages) -> bool:
    query = "SELECT 1 FROM sessions WHERE id = :owner"
    if await fetch_one(db, query, {"owner": shared.owner}) is not None:
        return True
    return 0 < shared.pages <= await _count_used(db, shared.owner)


async def _count_used(db: aiosqlite.Connection, owner: str) -> int:
    query = "SELECT coalesce(max(pages), 0) FROM page_refs WHERE owner = :owner"
    return await fetch_value(db, query, {"owner": owner})


async def _read_owners(db: aiosqlite.Connection, session_id: str) -> list[str]:
    query = "SELECT DISTINCT owner FROM page_refs WHERE session = :session ORDER BY owner"
    return [row["owner"] for row in await fetch_all(db, query, {"session": session_id})]


async def _find_shrunk(db: aiosqlite.Connection, owners: Sequence[str]) -> list[OrphanedPages]:
    """Return the deleted ones of these owners of which fewer pages are referenced than retained."""
    query = (
        "SELECT pages FROM retained_pages WHERE owner = :owner"
        " AND NOT EXISTS (SELECT 1 FROM sessions WHERE id = :owner)"
    )
    shrunk = []
    for owner in owners:
        row = await fetch_one(db, query, {"owner": owner})
        used = await _count_used(db, owner)
        if row is not None and used < row["pages"]:
            shrunk.append(OrphanedPages(owner, used))
    return shrunk


async def _note_orphaned(db: aiosqlite.Connection, orphaned: Sequence[OrphanedPages]) -> None:
    """Note pages of deleted sessions as orphaned, the others as retained."""
    rows = [_to_orphaned_row(each) for each in orphaned]
    await db.executemany(
        "REPLACE INTO retained_pages (owner, pages) VALUES (:owner, :keep_pages)", rows
    )
    await db.executemany(
        "DELETE FROM retained_pages WHERE owner = :owner AND pages = 0",
        [{"owner": each.session} for each in orphaned],
    )
    await db.executemany(
        "REPLACE INTO orphaned_pages (owner, keep_pages) VALUES (:owner, :keep_pages)", rows
    )


async def _read_abandoned(db: aiosqlite.Connection, now: float) -> list[str]:
    """Return the sessions whose creation was not committed; a later time is of another clock."""
    query = "SELECT session FROM creations WHERE abs(:now - since) >= :seconds"
    rows = await fetch_all(db, query, {"now": now, "seconds": CREATION_SECONDS})
    return [row["session"] for row in rows]


async def _orphan_abandoned(db: aiosqlite.Connection, now: float) -> None:
    """Note the pages of sessions whose creation was abandoned as orphaned."""
    for session in await _read_abandoned(db, now):
        await clear_orphaned(db, session)
        await _note_orphaned(db, [OrphanedPages(session, 0)])


async def _read_retained(db: aiosqlite.Connection) -> list[SharedPages]:
    rows = await fetch_all(db, "SELECT owner, pages FROM retained_pages ORDER BY owner")
    return [SharedPages(row["owner"], row["pages"]) for row in rows]


async def _read_orphaned(db: aiosqlite.Connection, limit: int = -1) -> list[OrphanedPages]:
    query = "SELECT owner, keep_pages FROM orphaned_pages ORDER BY owner LIMIT :limit"
    rows = await fetch_all(db, query, {"limit": limit})
    return [OrphanedPages(row["owner"], row["keep_pages"]) for row in rows]


def _to_orphaned_row(orphaned: OrphanedPages) -> dict[str, object]:
    return {"owner": orphaned.session, "keep_pages": orphaned.keep_pages}
