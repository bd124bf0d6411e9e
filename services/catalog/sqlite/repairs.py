"""Repairs in the SQLite catalog. The functions run in the caller's transaction."""

import sqlite3
import time

from kvrecall.domain.repairs import DueRepair
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.settings.session import RepairTrigger
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import REPAIRS_RETAINED, RepairCommit, RepairDetails, RepairRecord
from services.catalog.sqlite import mapping, session_rows
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import fetch_all, fetch_value, insert, require_session


class SqliteRepairs:
    """Repairs that were run, and which ones are still due."""

    def __init__(self, database: Database, encryption: Encryption) -> None:
        self._database = database
        self._ciphers = encryption.sessions

    async def commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Store the result of a repair. Raises UnknownSession, StaleEpoch."""
        cipher = await self._ciphers.to_write(session_id)

        def change(db: sqlite3.Connection) -> None:
            _mark_done(db, session_id, commit.repair, cipher)
            if commit.worker_state is not None:
                session_rows.replace_worker_state(db, session_id, commit.worker_state, cipher)
            if commit.memory is not None:
                session_rows.replace_memory(db, session_id, commit.memory)
            if commit.report is not None:
                query = "SELECT turns FROM sessions WHERE id = :session"
                turns = fetch_value(db, query, {"session": session_id})
                add_record(db, session_id, turns + 1, commit.report, commit.details, cipher)

        await self._database.write_fenced(session_id, epoch, change)

    async def get_latest(self, session_id: str, limit: int) -> list[RepairRecord]:
        """Return up to `limit` retained repairs, newest first. Raises UnknownSession."""
        query = "SELECT * FROM repairs WHERE session = :session ORDER BY number DESC LIMIT :limit"
        cipher = await self._ciphers.to_read(session_id)

        def read(db: sqlite3.Connection) -> list[RepairRecord]:
            require_session(db, session_id)
            rows = fetch_all(db, query, {"session": session_id, "limit": limit})
            return [mapping.from_repair_row(row, cipher) for row in rows]

        return await self._database.read(read)


def add_record(
    db: sqlite3.Connection,
    session_id: str,
    turn: int,
    report: RepairReport,
    details: RepairDetails,
    cipher: Cipher,
) -> None:
    """Add a repair that ran for `turn`, and delete the oldest beyond REPAIRS_RETAINED."""
    query = "SELECT 1 + coalesce(max(number), 0) FROM repairs WHERE session = :session"
    number = fetch_value(db, query, {"session": session_id})
    record = RepairRecord(number, turn, time.time(), report, details)
    insert(db, "repairs", [mapping.to_repair_row(session_id, record, cipher)])
    db.execute(
        "DELETE FROM repairs WHERE session = :session AND number <= :last_dropped",
        {"session": session_id, "last_dropped": number - REPAIRS_RETAINED},
    )


def _mark_done(db: sqlite3.Connection, session_id: str, repair: DueRepair, cipher: Cipher) -> None:
    if repair.trigger is RepairTrigger.LAST_OUTPUT:
        db.execute(
            "UPDATE sessions SET output_due = 0 WHERE id = :session", {"session": session_id}
        )
        return
    change, where = {
        RepairTrigger.TOOL_CALL: ("call_signal = :text", "position = :position"),
        RepairTrigger.TOOL_DELTA: ("delta_repaired = :reach", "position = :position"),
        RepairTrigger.TOOL_RESULT: ("result_repaired = 1", "batch = :batch"),
    }[repair.trigger]
    db.execute(
        f"UPDATE tool_calls SET {change}"
        f" WHERE session = :session AND consumed_in_turn IS NULL AND {where}",
        {
            "text": mapping.seal_call_signal(cipher, repair.position, repair.text),
            "reach": repair.reach,
            "position": repair.position,
            "batch": repair.batch,
            "session": session_id,
        },
    )
