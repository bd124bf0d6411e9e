"""Pages that sessions have, and dead ones, in the SQLite catalog.

Functions and nodes run in the caller's transaction.
"""

import sqlite3
from collections.abc import Sequence
from functools import partial

from kvrecall.domain.page_ids import ID_BYTES, PageId, join_ids, split_ids
from services.catalog import page_tree
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import fetch_all, fetch_one, fetch_value

# The number of ids of one query: others wait for the connection meanwhile.
_PAGES_AT_ONCE = 2000
# The ids in `:ids`, joined, as rows.
_GIVEN = (
    "WITH RECURSIVE places (at) AS (SELECT 1 WHERE length(:ids) > 0"
    " UNION ALL SELECT at + :size FROM places WHERE at + :size <= length(:ids)),"
    " given (id) AS (SELECT substr(:ids, at, :size) FROM places) SELECT id FROM given WHERE "
)
_IS_LIVE = "EXISTS (SELECT 1 FROM pages WHERE pages.id = given.id)"
_IS_DEAD = "EXISTS (SELECT 1 FROM dead_pages WHERE dead_pages.id = given.id)"


class SqlitePages:
    """Pages that no session has, and which of some are such."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def drop_abandoned(self, older_than_seconds: float) -> None:
        """Do nothing: a crash leaves no part of a transaction."""

    async def get_dead(self, limit: int) -> list[PageId]:
        """Return up to `limit` dead pages, oldest first."""
        query = "SELECT id FROM dead_pages ORDER BY number LIMIT :limit"
        rows = await self._database.read(lambda db: fetch_all(db, query, {"limit": limit}))
        return [row["id"] for row in rows]

    async def count_dead(self) -> int:
        """Return the number of dead pages."""
        query = "SELECT count(*) FROM dead_pages"
        return await self._database.read(lambda db: fetch_value(db, query))

    async def confirm_deleted(self, ids: Sequence[PageId]) -> None:
        """Forget dead pages."""

        def change(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM dead_pages WHERE id = ?", [(id,) for id in ids])

        await self._database.write(change, grows=False)

    async def find_live(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that some session has."""
        return await self._find(ids, _IS_LIVE)

    async def find_unknown(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that no session has and that are not dead."""
        return await self._find(ids, f"NOT {_IS_LIVE} AND NOT {_IS_DEAD}")

    async def _find(self, ids: Sequence[PageId], where: str) -> list[PageId]:
        found: list[PageId] = []
        for first in range(0, len(ids), _PAGES_AT_ONCE):
            some = join_ids(ids[first : first + _PAGES_AT_ONCE])
            values = {"ids": some, "size": ID_BYTES}
            rows = await self._database.read(
                partial(fetch_all, query=_GIVEN + where, values=values)
            )
            found += [row["id"] for row in rows]
        return found


class SqliteNodes:
    """`services.catalog.page_tree.Nodes` in the table `pages`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def has(self, page: PageId) -> bool:
        """Return whether some session has the page."""
        return fetch_one(self._db, "SELECT 1 FROM pages WHERE id = :id", {"id": page}) is not None

    def add(self, page: PageId, before: PageId | None) -> None:
        """Add a page; it is not dead."""
        self._db.execute(
            "INSERT INTO pages (id, parent, refs) VALUES (:id, :parent, 1)",
            {"id": page, "parent": before},
        )
        self._db.execute("DELETE FROM dead_pages WHERE id = :id", {"id": page})

    def hold(self, page: PageId) -> None:
        """Add a reference to a page."""
        self._db.execute("UPDATE pages SET refs = refs + 1 WHERE id = :id", {"id": page})

    def release(self, page: PageId) -> PageId | None:
        """Take a reference from a page; return the page before one that is dead now."""
        query = "DELETE FROM pages WHERE id = :id AND refs = 1 RETURNING parent"
        dead = fetch_one(self._db, query, {"id": page})
        if dead is None:
            self._db.execute("UPDATE pages SET refs = refs - 1 WHERE id = :id", {"id": page})
            return None
        self._db.execute("INSERT INTO dead_pages (id) VALUES (:id)", {"id": page})
        before: PageId | None = dead["parent"]
        return before


def set_pages(db: sqlite3.Connection, session_id: str, page_ids: bytes) -> None:
    """Let a session have exactly these pages."""
    query = "SELECT last_page FROM sessions WHERE id = :session"
    row = fetch_one(db, query, {"session": session_id})
    before = None if row is None else row["last_page"]
    last = page_tree.replace(SqliteNodes(db), before, split_ids(page_ids))
    if last != before:
        db.execute(
            "UPDATE sessions SET last_page = :last WHERE id = :session",
            {"last": last, "session": session_id},
        )


def drop_pages(db: sqlite3.Connection, last: PageId | None) -> None:
    """Forget a deleted session that ended with this page."""
    page_tree.drop(SqliteNodes(db), last)
