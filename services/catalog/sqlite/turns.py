"""Turns in the SQLite catalog."""

import sqlite3
from dataclasses import replace
from itertools import chain

from kvrecall.domain.sessions.session import Turn
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import HistoryEntry, IdempotencyRecord, SettleCommit, TurnCommit
from services.catalog.serialization import unpack
from services.catalog.sqlite import (
    episodes,
    mapping,
    repairs,
    session_rows,
    tool_calls,
)
from services.catalog.sqlite.histories import add_history
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    check_session_use,
    fetch_all,
    insert,
    require_session,
)


class SqliteTurns:
    """The turn log of each session."""

    def __init__(
        self, database: Database, idempotency: SqliteIdempotency, encryption: Encryption
    ) -> None:
        self._database = database
        self._idempotency = idempotency
        self._encryption = encryption

    async def commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append a turn with everything it changes. Raises UnknownSession, StaleEpoch, QuotaExceeded."""
        cipher = await self._encryption.sessions.to_write(commit.turn.session)
        sealed = await self._idempotency.seal(record)
        history = self._encryption.name_digest(commit.history) if commit.history else ""
        named = replace(commit, history=history)

        def change(db: sqlite3.Connection) -> None:
            _add_turn(db, named, self._database.now(), cipher)
            self._idempotency.store(db, sealed)
            check_session_use(db, commit.turn.session, limits, "tokens", "bytes")

        await self._database.write_fenced(commit.turn.session, epoch, change)

    async def commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        """Replace the worker state and the memory report. Raises UnknownSession, StaleEpoch."""
        cipher = await self._encryption.sessions.to_write(session_id)

        def change(db: sqlite3.Connection) -> None:
            session_rows.replace_pages(db, session_id, commit.worker_state, commit.page_ids, cipher)
            session_rows.replace_memory(db, session_id, commit.memory)

        await self._database.write_fenced(session_id, epoch, change)

    async def get_after(self, session_id: str, number: int, limit: int) -> list[Turn]:
        """Return up to `limit` turns that follow turn `number`, in order."""
        query = (
            "SELECT * FROM turns WHERE session = :session AND number > :number"
            " ORDER BY number LIMIT :limit"
        )
        values = {"session": session_id, "number": number, "limit": limit}
        cipher = await self._encryption.sessions.to_read(session_id)

        def read(db: sqlite3.Connection) -> list[Turn]:
            return [mapping.from_turn_row(row, cipher) for row in fetch_all(db, query, values)]

        return await self._database.read(read)

    async def get_state(self, session_id: str, number: int) -> bytes | None:
        """Return the serialized pb.SessionState at the end of turn `number`, if it was kept."""
        cipher = await self._encryption.sessions.to_read(session_id)

        def read(db: sqlite3.Connection) -> bytes | None:
            packed = session_rows.read_kept_state(db, session_id, number, cipher)
            return None if packed is None else unpack(packed)

        return await self._database.read(read)

    async def get_token_ids(self, session_id: str) -> tuple[int, ...]:
        """Return all tokens that the session's turns appended. Raises UnknownSession."""
        query = "SELECT number, token_ids FROM turns WHERE session = :session ORDER BY number"
        cipher = await self._encryption.sessions.to_read(session_id)

        def read(db: sqlite3.Connection) -> tuple[int, ...]:
            require_session(db, session_id)
            rows = fetch_all(db, query, {"session": session_id})
            return tuple(chain.from_iterable(mapping.open_token_ids(row, cipher) for row in rows))

        return await self._database.read(read)


def _add_turn(db: sqlite3.Connection, commit: TurnCommit, now: float, cipher: Cipher) -> None:
    turn = commit.turn
    outcome = turn.outcome
    insert(db, "turns", [mapping.to_turn_row(turn, cipher)])
    db.execute(
        "UPDATE sessions SET turns = :turns, updated_at = :now, output_due = :output_due,"
        " expires_at = :now + :lifetime WHERE id = :session",
        {
            "turns": turn.number,
            "now": now,
            "lifetime": commit.lifetime,
            "output_due": 0 if commit.calls else outcome.output_tokens,
            "session": turn.session,
        },
    )
    session_rows.replace_memory(db, turn.session, outcome.memory)
    session_rows.replace_pages(db, turn.session, commit.worker_state, commit.page_ids, cipher)
    if commit.kept is not None:
        session_rows.keep_state(db, turn.session, turn.number, commit.kept, cipher)
    episodes.count_match(db, turn.session, commit.matched, commit.active)
    tool_calls.end_pause(db, turn, commit.inline_results, cipher)
    tool_calls.begin_pause(db, turn, commit.calls, now, cipher)
    if outcome.own_repair is not None:
        report, details = outcome.own_repair, commit.repaired
        repairs.add_record(db, turn.session, turn.number, report, details, cipher)
    if commit.history:
        add_history(db, HistoryEntry(commit.history, turn.session, turn.number))
