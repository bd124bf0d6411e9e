"""References to shared pages in the SQLite catalog. The functions run in the caller's transaction.

A session references every owner in its ancestry, so the number of an owner's pages in use is one
maximum over `page_refs`, and no chain of forks is ever walked.
"""

import json
import sqlite3
from collections.abc import Sequence

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.sessions.session import SharedPages
from services.catalog.records import CREATION_SECONDS, KnownPrefix, OrphanedPages
from services.catalog.serialization import COMMIT_POINTS
from services.catalog.sqlite.page_runs import drop_pages, find_prefix
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
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

        def change(db: sqlite3.Connection) -> bool:
            require_session(db, session_id)
            if not _exist(db, shared):
                return False
            _add_reservation(db, session_id, shared)
            return True

        return await self._database.write(change)

    async def find_prefix(self, tenant: str, page_ids: bytes) -> KnownPrefix:
        """Find sessions that begin with the most of these pages: ids, which are a tenant's own."""
        return await self._database.read(lambda db: find_prefix(db, page_ids))

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

        def change(db: sqlite3.Connection) -> None:
            insert(db, "creations", [row])

        await self._database.write(change)

    async def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet."""
        now = self._database.now()

        def read(db: sqlite3.Connection) -> tuple[list[str], list[OrphanedPages]]:
            return _read_abandoned(db, now), _read_orphaned(db)

        abandoned, orphaned = await self._database.read(read)
        if not abandoned:
            return orphaned
        await self._database.write(lambda db: _orphan_abandoned(db, now), grows=False)
        return await self._database.read(_read_orphaned)

    async def confirm_deleted(self, orphaned: OrphanedPages) -> None:
        """Note that these pages are deleted; a later note that keeps fewer pages stays."""

        def change(db: sqlite3.Connection) -> None:
            db.execute(
                "DELETE FROM orphaned_pages WHERE owner = :owner AND keep_pages = :keep_pages",
                _to_orphaned_row(orphaned),
            )

        await self._database.write(change, grows=False)


def replace_refs(db: sqlite3.Connection, session_id: str, shared: Sequence[SharedPages]) -> None:
    """Replace the session's references and reservations; note the pages that this orphans."""
    owners = _read_owners(db, session_id)
    db.execute("DELETE FROM page_refs WHERE session = :session", {"session": session_id})
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
    insert(db, "page_refs", rows)
    _note_orphaned(db, _find_shrunk(db, owners))


def require_pages(db: sqlite3.Connection, shared: Sequence[SharedPages]) -> None:
    """Check that the pages of all owners exist. Raises UnknownSession."""
    for each in shared:
        if not _exist(db, each):
            raise UnknownSession(each.owner)


def delete_session(db: sqlite3.Connection, session_id: str) -> list[OrphanedPages]:
    """Delete a session; return its orphaned pages, then some others. Raises UnknownSession."""
    owners = _read_owners(db, session_id)
    query = "DELETE FROM sessions WHERE id = :session RETURNING run"
    deleted = fetch_one(db, query, {"session": session_id})
    if deleted is None:
        raise UnknownSession(session_id)
    drop_pages(db, deleted["run"])
    own = OrphanedPages(session_id, _count_used(db, session_id))
    shrunk = _find_shrunk(db, owners)
    _note_orphaned(db, [own, *shrunk])
    return list(dict.fromkeys([own, *shrunk, *_read_orphaned(db, _ORPHANED_AT_ONCE)]))


def clear_orphaned(db: sqlite3.Connection, owner: str) -> None:
    """Drop the notes of an owner's orphaned pages and of its creation."""
    db.execute("DELETE FROM orphaned_pages WHERE owner = :owner", {"owner": owner})
    db.execute("DELETE FROM creations WHERE session = :owner", {"owner": owner})


def _add_reservation(db: sqlite3.Connection, session_id: str, shared: SharedPages) -> None:
    row = {
        "session": session_id,
        "owner": shared.owner,
        "pages": shared.pages,
        "position": RESERVED,
    }
    db.execute(
        f"{build_insert('page_refs', row)} ON CONFLICT (session, owner, position)"
        " DO UPDATE SET pages = max(pages, excluded.pages)",
        row,
    )


def _exist(db: sqlite3.Connection, shared: SharedPages) -> bool:
    query = "SELECT 1 FROM sessions WHERE id = :owner"
    if fetch_one(db, query, {"owner": shared.owner}) is not None:
        return True
    return 0 < shared.pages <= _count_used(db, shared.owner)


def _count_used(db: sqlite3.Connection, owner: str) -> int:
    query = "SELECT coalesce(max(pages), 0) FROM page_refs WHERE owner = :owner"
    return fetch_value(db, query, {"owner": owner})


def _read_owners(db: sqlite3.Connection, session_id: str) -> list[str]:
    query = "SELECT DISTINCT owner FROM page_refs WHERE session = :session ORDER BY owner"
    return [row["owner"] for row in fetch_all(db, query, {"session": session_id})]


def _find_shrunk(db: sqlite3.Connection, owners: Sequence[str]) -> list[OrphanedPages]:
    """Return the deleted owners that retain more pages than are still referenced."""
    query = (
        "SELECT pages FROM retained_pages WHERE owner = :owner"
        " AND NOT EXISTS (SELECT 1 FROM sessions WHERE id = :owner)"
    )
    shrunk = []
    for owner in owners:
        row = fetch_one(db, query, {"owner": owner})
        used = _count_used(db, owner)
        if row is not None and used < row["pages"]:
            shrunk.append(OrphanedPages(owner, used))
    return shrunk


def _note_orphaned(db: sqlite3.Connection, orphaned: Sequence[OrphanedPages]) -> None:
    """Note pages of deleted sessions as orphaned, the others as retained."""
    rows = [_to_orphaned_row(each) for each in orphaned]
    db.executemany("REPLACE INTO retained_pages (owner, pages) VALUES (:owner, :keep_pages)", rows)
    db.executemany(
        "DELETE FROM retained_pages WHERE owner = :owner AND pages = 0",
        [{"owner": each.session} for each in orphaned],
    )
    db.executemany(
        "REPLACE INTO orphaned_pages (owner, keep_pages) VALUES (:owner, :keep_pages)", rows
    )


def _read_abandoned(db: sqlite3.Connection, now: float) -> list[str]:
    """Return the sessions whose creation was not committed; a later time is of another clock."""
    query = "SELECT session FROM creations WHERE abs(:now - since) >= :seconds"
    rows = fetch_all(db, query, {"now": now, "seconds": CREATION_SECONDS})
    return [row["session"] for row in rows]


def _orphan_abandoned(db: sqlite3.Connection, now: float) -> None:
    """Note the pages of sessions whose creation was abandoned as orphaned."""
    for session in _read_abandoned(db, now):
        clear_orphaned(db, session)
        _note_orphaned(db, [OrphanedPages(session, 0)])


def _read_retained(db: sqlite3.Connection) -> list[SharedPages]:
    rows = fetch_all(db, "SELECT owner, pages FROM retained_pages ORDER BY owner")
    return [SharedPages(row["owner"], row["pages"]) for row in rows]


def _read_orphaned(db: sqlite3.Connection, limit: int = -1) -> list[OrphanedPages]:
    query = "SELECT owner, keep_pages FROM orphaned_pages ORDER BY owner LIMIT :limit"
    rows = fetch_all(db, query, {"limit": limit})
    return [OrphanedPages(row["owner"], row["keep_pages"]) for row in rows]


def _to_orphaned_row(orphaned: OrphanedPages) -> dict[str, object]:
    return {"owner": orphaned.session, "keep_pages": orphaned.keep_pages}
