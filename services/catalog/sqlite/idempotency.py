"""Responses by idempotency key in the SQLite catalog."""

import aiosqlite

from kvrecall.domain.errors import IdempotencyConflict
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.sqlite.database import Database
from services.catalog.sqlite.queries import build_insert, fetch_one, fetch_value

# The session that the request created still exists, if it created one.
_IS_VALID = "(created = '' OR created IN (SELECT id FROM sessions))"


class SqliteIdempotency:
    """Responses to requests, the newest `max_records` of them."""

    def __init__(self, database: Database, max_records: int) -> None:
        self._database = database
        self._max_records = max_records

    async def get(self, key: IdempotencyKey) -> str | None:
        """Return the stored response. Raises IdempotencyConflict when the body differs."""
        query = (
            "SELECT fingerprint, response FROM idempotency_records"
            f" WHERE scope = :scope AND key = :key AND {_IS_VALID}"
        )
        values = {"scope": key.scope, "key": key.key}
        row = await self._database.read(lambda db: fetch_one(db, query, values))
        if row is None:
            return None
        if row["fingerprint"] != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return str(row["response"])

    async def store(
        self, db: aiosqlite.Connection, record: IdempotencyRecord | None, created: str = ""
    ) -> None:
        """Store a response in the caller's transaction, and delete the oldest ones.

        `created` is the session that the request created, if any.
        """
        if record is None:
            return
        key = record.key
        row = {
            "created": created,
            "scope": key.scope,
            "key": key.key,
            "fingerprint": key.fingerprint,
            "response": record.response,
        }
        await db.execute(
            "DELETE FROM idempotency_records"
            f" WHERE scope = :scope AND key = :key AND NOT {_IS_VALID}",
            {"scope": key.scope, "key": key.key},
        )
        number = await fetch_value(
            db, f"{build_insert('idempotency_records', row)} RETURNING number", row
        )
        await db.execute(
            "DELETE FROM idempotency_records WHERE number <= :last_dropped",
            {"last_dropped": number - self._max_records},
        )
