"""Whose pages a session uses, in the SQLite catalog. Each function runs within a transaction of its caller.

A session names every owner in its lineage, so what is still used of an owner is one maximum over `shares`, and no
chain of forks is ever walked.
"""

import sqlite3
from collections.abc import Sequence

import aiosqlite

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.session import SharedPages
from services.catalog.base import KnownPrefix, OrphanedPages
from services.catalog.serialization import token_bytes, token_values
from services.catalog.sqlite.statements import check_session, every, one

_PROMISED = -1
"""The place of pages that a session may come to use."""


async def read_shares(db: aiosqlite.Connection, session: str) -> tuple[SharedPages, ...]:
    """The pages of others that the session begins with."""
    query = "SELECT owner, pages FROM shares WHERE session = ? AND place > ? ORDER BY place"
    return tuple(
        SharedPages(row["owner"], row["pages"])
        for row in await every(db, query, (session, _PROMISED))
    )


async def replace_shares(
    db: aiosqlite.Connection, session: str, shared: Sequence[SharedPages]
) -> None:
    """Count just these from now on."""
    await db.execute("DELETE FROM shares WHERE session = ?", (session,))
    values = [(session, each.owner, each.pages, place) for place, each in enumerate(shared)]
    await db.executemany("INSERT INTO shares VALUES (?, ?, ?, ?)", values)


async def promise(db: aiosqlite.Connection, session: str, shared: SharedPages) -> bool:
    """Count pages that the session may come to use; False if they are no more. Raises UnknownSession."""
    await check_session(db, session)
    if not await _are_there(db, shared):
        return False
    await db.execute(
        "INSERT INTO shares VALUES (?, ?, ?, ?)"
        " ON CONFLICT (session, owner, place) DO UPDATE SET pages = max(pages, excluded.pages)",
        (session, shared.owner, shared.pages, _PROMISED),
    )
    return True


async def check_shared(db: aiosqlite.Connection, shared: Sequence[SharedPages]) -> None:
    """Raises UnknownSession when the pages of one of them are no more."""
    for each in shared:
        if not await _are_there(db, each):
            raise UnknownSession(each.owner)


async def add_prefix(db: aiosqlite.Connection, digest: str, prefix: KnownPrefix) -> None:
    """Let others share a session's first tokens, unless they share another's already."""
    values = (digest, prefix.owner, token_bytes(prefix.token_ids))
    await db.execute(
        "INSERT INTO prefixes VALUES (?, ?, ?) ON CONFLICT (digest) DO NOTHING", values
    )


async def read_prefix(db: aiosqlite.Connection, digest: str) -> KnownPrefix | None:
    """What a session with this digest said first."""
    row = await one(db, "SELECT owner, token_ids FROM prefixes WHERE digest = ?", (digest,))
    return None if row is None else KnownPrefix(row["owner"], token_values(row["token_ids"]))


async def read_kept(db: aiosqlite.Connection) -> list[SharedPages]:
    """Deleted sessions of which pages are still shared."""
    return [SharedPages(row["owner"], row["used"]) for row in await _kept(db) if row["used"]]


async def delete(db: aiosqlite.Connection, session: str) -> list[OrphanedPages]:
    """Forget a session: its leftover, then all others that there are. Raises UnknownSession."""
    if await one(db, "DELETE FROM sessions WHERE id = ? RETURNING id", (session,)) is None:
        raise UnknownSession(session)
    own = OrphanedPages(session, await _used(db, session))
    shrunk = [
        OrphanedPages(row["owner"], row["used"])
        for row in await _kept(db)
        if row["used"] < row["pages"]
    ]
    changed = [(each.session, each.keep_pages) for each in (own, *shrunk)]
    await db.executemany("REPLACE INTO kept VALUES (?, ?)", changed)
    await db.execute("DELETE FROM kept WHERE pages = 0")
    await db.executemany("REPLACE INTO leftovers VALUES (?, ?)", changed)
    return [own, *(left for left in await read_leftovers(db) if left != own)]


async def read_leftovers(db: aiosqlite.Connection) -> list[OrphanedPages]:
    """What was not dropped yet."""
    rows = await every(db, "SELECT owner, kept FROM leftovers ORDER BY owner", ())
    return [OrphanedPages(row["owner"], row["kept"]) for row in rows]


async def forget_leftover(db: aiosqlite.Connection, left: OrphanedPages) -> None:
    """It was dropped; a later one, of which fewer pages are kept, stays."""
    await db.execute(
        "DELETE FROM leftovers WHERE owner = ? AND kept = ?", (left.session, left.keep_pages)
    )


async def _are_there(db: aiosqlite.Connection, shared: SharedPages) -> bool:
    lives = await one(db, "SELECT 1 FROM sessions WHERE id = ?", (shared.owner,)) is not None
    return lives or 0 < shared.pages <= await _used(db, shared.owner)


async def _used(db: aiosqlite.Connection, owner: str) -> int:
    row = await one(
        db, "SELECT coalesce(max(pages), 0) AS used FROM shares WHERE owner = ?", (owner,)
    )
    assert row is not None, "an aggregate has one row"
    return int(row["used"])


async def _kept(db: aiosqlite.Connection) -> list[sqlite3.Row]:
    """Columns owner, pages, and how many are `used` now."""
    query = (
        "SELECT owner, pages, coalesce((SELECT max(pages) FROM shares WHERE shares.owner = kept.owner), 0) AS used"
        " FROM kept ORDER BY owner"
    )
    return await every(db, query, ())
