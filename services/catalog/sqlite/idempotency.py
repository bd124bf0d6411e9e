"""Answers that are given again, in the SQLite catalog. Each function runs within a transaction of its caller."""

import aiosqlite

from kvrecall.domain.errors import IdempotencyConflict
from services.catalog.base import IdempotencyKey, IdempotencyRecord
from services.catalog.sqlite.statements import one

_TELLS_OF_WHAT_IS = "(made = '' OR made IN (SELECT id FROM sessions))"


async def remember(
    db: aiosqlite.Connection, answer: IdempotencyRecord | None, made: str, most: int
) -> None:
    """Keep an answer, of a request that made the session `made` (empty: none), and forget all but the last `most`."""
    if answer is None:
        return
    key = answer.key
    gone = f"DELETE FROM answers WHERE scope = ? AND key = ? AND NOT {_TELLS_OF_WHAT_IS}"
    await db.execute(gone, (key.scope, key.key))
    insert = "INSERT INTO answers (made, scope, key, fingerprint, answer) VALUES (?, ?, ?, ?, ?) RETURNING number"
    row = await one(db, insert, (made, key.scope, key.key, key.fingerprint, answer.answer))
    assert row is not None, "an INSERT that succeeds returns its row"
    await db.execute("DELETE FROM answers WHERE number <= ?", (row["number"] - most,))


async def recall(db: aiosqlite.Connection, key: IdempotencyKey) -> str | None:
    """The answer under `key`, unless the session that it tells of is no more. Raises IdempotencyConflict."""
    query = f"SELECT fingerprint, answer FROM answers WHERE scope = ? AND key = ? AND {_TELLS_OF_WHAT_IS}"
    row = await one(db, query, (key.scope, key.key))
    if row is None:
        return None
    if row["fingerprint"] != key.fingerprint:
        raise IdempotencyConflict(key.key)
    return str(row["answer"])
