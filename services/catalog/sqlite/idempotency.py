"""Responses by idempotency key in the SQLite catalog; each expires after a day.

The latest ones are kept whatever the clock says: it may be set forward while the process is down.
"""

import sqlite3

from kvrecall.domain.errors import IdempotencyConflict
from services.catalog.encryption.answers import open_answer, seal_answer
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import build_insert, fetch_one

_RETAINED_SECONDS = 24 * 3600.0
_RETAINED_RECORDS = 1000
# The session that the request created still exists, if it created one.
_IS_VALID = "(created = '' OR created IN (SELECT id FROM sessions))"
_DELETE_EXPIRED = """
DELETE FROM idempotency_records
WHERE stored_at <= :expired
AND rowid <= (SELECT max(rowid) FROM idempotency_records) - :retained
"""


class SqliteIdempotency:
    """Responses to requests."""

    def __init__(self, database: Database, encryption: Encryption) -> None:
        self._database = database
        self._tenants = encryption.tenants

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
        fingerprint, response = await open_answer(
            self._tenants, key, row["fingerprint"], row["response"]
        )
        if fingerprint != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return response

    async def seal(self, record: IdempotencyRecord | None) -> IdempotencyRecord | None:
        """Return a record as it is stored: before the transaction that stores it."""
        return await seal_answer(self._tenants, record)

    def replace(self, db: sqlite3.Connection, record: IdempotencyRecord | None) -> None:
        """Store a response in the caller's transaction, in place of one that is void."""
        if record is not None:
            key = {"scope": record.key.scope, "key": record.key.key}
            db.execute("DELETE FROM idempotency_records WHERE scope = :scope AND key = :key", key)
            self.store(db, record)

    def store(
        self, db: sqlite3.Connection, record: IdempotencyRecord | None, created: str = ""
    ) -> None:
        """Store a response in the caller's transaction, and delete those that have expired.

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
            "stored_at": self._database.now(),
        }
        db.execute(
            "DELETE FROM idempotency_records"
            f" WHERE scope = :scope AND key = :key AND NOT {_IS_VALID}",
            {"scope": key.scope, "key": key.key},
        )
        db.execute(build_insert("idempotency_records", row), row)
        expired = self._database.now() - _RETAINED_SECONDS
        db.execute(_DELETE_EXPIRED, {"expired": expired, "retained": _RETAINED_RECORDS})
