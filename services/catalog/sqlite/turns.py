"""Turns in the SQLite catalog."""

import sqlite3

from kvrecall.domain.sessions.session import Turn
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import HistoryEntry, IdempotencyRecord, SettleCommit, TurnCommit
from services.catalog.serialization import decode_tokens, unpack, unseal
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
    fetch_one,
    insert,
    require_session,
)


class SqliteTurns:
    """The turn log of each session."""

    def __init__(self, database: Database, idempotency: SqliteIdempotency) -> None:
        self._database = database
        self._idempotency = idempotency

    async def commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append a turn with everything it changes. Raises UnknownSession, StaleEpoch, QuotaExceeded."""

        def change(db: sqlite3.Connection) -> None:
            _add_turn(db, commit, self._database.now())
            self._idempotency.store(db, record)
            check_session_use(db, commit.turn.session, limits, "tokens", "bytes")

        await self._database.write_fenced(commit.turn.session, epoch, change)

    async def commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        """Replace the worker state and the memory report. Raises UnknownSession, StaleEpoch."""

        def change(db: sqlite3.Connection) -> None:
            session_rows.replace_pages(db, session_id, commit.worker_state, commit.page_ids)
            session_rows.replace_memory(db, session_id, commit.memory)

        await self._database.write_fenced(session_id, epoch, change)

    async def get_after(self, session_id: str, number: int, limit: int) -> list[Turn]:
        """Return up to `limit` turns that follow turn `number`, in order."""
        query = (
            "SELECT * FROM turns WHERE session = :session AND number > :number"
            " ORDER BY number LIMIT :limit"
        )
        values = {"session": session_id, "number": number, "limit": limit}

        def read(db: sqlite3.Connection) -> list[Turn]:
            return [mapping.from_turn_row(row) for row in fetch_all(db, query, values)]

        return await self._database.read(read)

    async def get_state(self, session_id: str, number: int) -> bytes | None:
        """Return the serialized pb.SessionState at the end of turn `number`, if it was kept."""
        query = "SELECT state FROM turn_states WHERE session = :session AND turn = :turn"
        values = {"session": session_id, "turn": number}

        def read(db: sqlite3.Connection) -> bytes | None:
            row = fetch_one(db, query, values)
            return None if row is None else unpack(row["state"])

        return await self._database.read(read)

    async def get_token_ids(self, session_id: str) -> tuple[int, ...]:
        """Return all tokens that the session's turns appended. Raises UnknownSession."""
        query = "SELECT token_ids FROM turns WHERE session = :session ORDER BY number"

        def read(db: sqlite3.Connection) -> tuple[int, ...]:
            require_session(db, session_id)
            rows = fetch_all(db, query, {"session": session_id})
            return decode_tokens(b"".join(unseal(row["token_ids"]) for row in rows))

        return await self._database.read(read)


def _add_turn(db: sqlite3.Connection, commit: TurnCommit, now: float) -> None:
    turn = commit.turn
    outcome = turn.outcome
    insert(db, "turns", [mapping.to_turn_row(turn)])
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
    session_rows.replace_pages(db, turn.session, commit.worker_state, commit.page_ids)
    if commit.kept is not None:
        session_rows.keep_state(db, turn.session, turn.number, commit.kept)
    episodes.count_match(db, turn.session, commit.matched, commit.active)
    tool_calls.end_pause(db, turn, commit.inline_results)
    tool_calls.begin_pause(db, turn, commit.calls, now)
    if outcome.own_repair is not None:
        repairs.add_record(db, turn.session, turn.number, outcome.own_repair, commit.repaired)
    if commit.history:
        add_history(db, HistoryEntry(commit.history, turn.session, turn.number))
