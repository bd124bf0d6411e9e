"""Tool calls in the SQLite catalog. The functions run in the caller's transaction."""

import sqlite3
from collections.abc import Iterable, Mapping

from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import CallPosition, IdempotencyRecord
from services.catalog.sqlite import mapping
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import check_session_use, fetch_all, fetch_one, insert

IS_OPEN = "session = :session AND consumed_in_turn IS NULL"


class SqliteToolCalls:
    """Tool calls and what clients report of them."""

    def __init__(
        self, database: Database, idempotency: SqliteIdempotency, encryption: Encryption
    ) -> None:
        self._database = database
        self._idempotency = idempotency
        self._encryption = encryption

    async def get(self, session_id: str, call_id: str) -> PendingCall:
        """Return the newest call of that id. Raises UnknownCall."""
        query = (
            "SELECT * FROM tool_calls WHERE session = :session AND id = :call"
            " ORDER BY turn DESC, position LIMIT 1"
        )
        cipher = await self._encryption.sessions.to_read(session_id)

        def read(db: sqlite3.Connection) -> PendingCall:
            row = fetch_one(db, query, {"session": session_id, "call": call_id})
            if row is None:
                raise UnknownCall(session_id, call_id)
            return mapping.from_call_row(row, cipher)

        return await self._database.read(read)

    async def get_pieces(
        self, session_id: str, call: PendingCall, first: int, limit: int
    ) -> tuple[str, ...]:
        """Return pieces of a call's output from `first` on, up to the first missing one."""
        query = (
            "SELECT piece, text FROM tool_output WHERE session = :session AND turn = :turn"
            " AND position = :position AND piece >= :first ORDER BY piece LIMIT :limit"
        )
        at = {"turn": call.turn, "position": call.position, "first": first, "limit": limit}
        values = {"session": session_id} | at
        cipher = await self._encryption.sessions.to_read(session_id)
        rows = await self._database.read(lambda db: fetch_all(db, query, values))
        return tuple(
            mapping.from_piece_row(row, (call.turn, call.position), cipher)
            for index, row in enumerate(rows, first)
            if row["piece"] == index
        )

    async def commit(
        self,
        session_id: str,
        call: PendingCall,
        epoch: int,
        record: IdempotencyRecord | None,
        piece: tuple[int, str] | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Store the reported state of a call. Raises UnknownSession, StaleEpoch, QuotaExceeded."""
        cipher = await self._encryption.sessions.to_write(session_id)
        sealed = await self._idempotency.seal(record)

        def change(db: sqlite3.Connection) -> None:
            _write_report(db, session_id, call, self._database.now(), cipher)
            if piece is not None:
                add_pieces(db, session_id, (call.turn, call.position), dict([piece]), cipher)
            self._idempotency.store(db, sealed)
            check_session_use(db, session_id, limits, "bytes")

        await self._database.write_fenced(session_id, epoch, change)

    async def get_time(self) -> float:
        """Return the time of the clock that events are stored under."""
        return self._database.now()

    async def get_idle_sessions(self, since: float) -> list[str]:
        """Return the sessions with a pending call without an event after `since`."""
        query = (
            "SELECT DISTINCT session FROM tool_calls WHERE status = 'pending'"
            " AND consumed_in_turn IS NULL AND last_event_at <= :since"
        )
        rows = await self._database.read(lambda db: fetch_all(db, query, {"since": since}))
        return [row["session"] for row in rows]


def end_pause(
    db: sqlite3.Connection, turn: Turn, inline_results: Mapping[str, str], cipher: Cipher
) -> None:
    """Mark the open calls as consumed by a turn, which brought some of the results itself."""
    for call_id, result in inline_results.items():
        db.execute(
            f"UPDATE tool_calls SET status = :status, result = :result WHERE {IS_OPEN}"
            " AND id = :call",
            {
                "status": CallStatus.COMPLETED.value,
                "result": mapping.seal_of_call(cipher, "result", call_id, result),
                "session": turn.session,
                "call": call_id,
            },
        )
    db.execute(
        f"UPDATE tool_calls SET consumed_in_turn = :turn WHERE {IS_OPEN}",
        {"turn": turn.number, "session": turn.session},
    )


def begin_pause(
    db: sqlite3.Connection, turn: Turn, calls: Iterable[ToolCall], now: float, cipher: Cipher
) -> None:
    """Add the calls that a turn ended on."""
    made = [
        PendingCall(turn.number, position, call, last_event_at=now)
        for position, call in enumerate(calls)
    ]
    add_calls(db, turn.session, made, cipher)


def add_calls(
    db: sqlite3.Connection, session_id: str, calls: Iterable[PendingCall], cipher: Cipher
) -> None:
    """Add calls in the state they are in."""
    insert(db, "tool_calls", [mapping.to_call_row(session_id, call, cipher) for call in calls])


def add_pieces(
    db: sqlite3.Connection,
    session_id: str,
    call: CallPosition,
    pieces: Mapping[int, str],
    cipher: Cipher,
) -> None:
    """Add pieces of a call's output."""
    insert(db, "tool_output", mapping.to_piece_rows(session_id, call, pieces, cipher))


def copy_pause(
    db: sqlite3.Connection, parent: str, child: str, turn: int, now: float, cipher: Cipher
) -> None:
    """Copy the calls that the parent's turn ended on to the child, as they were made."""
    rows = fetch_all(
        db,
        "SELECT * FROM tool_calls WHERE session = :parent AND turn = :turn ORDER BY position",
        {"parent": parent, "turn": turn},
    )
    made = [
        PendingCall(turn, call.position, call.call, last_event_at=now)
        for call in (mapping.from_call_row(row, cipher) for row in rows)
    ]
    add_calls(db, child, made, cipher)


def _write_report(
    db: sqlite3.Connection, session_id: str, call: PendingCall, now: float, cipher: Cipher
) -> None:
    id = call.call.id
    call = call.stamped(now)
    db.execute(
        "UPDATE tool_calls SET started = :started, running = :running, output = :output,"
        " delta_due = :delta_due, status = :status, result = :result, batch = :batch,"
        " last_event_at = :now"
        " WHERE session = :session AND turn = :turn AND position = :position",
        {
            "started": call.started,
            "running": mapping.seal_of_call(cipher, "running", id, call.arguments),
            "output": mapping.encode_output(call),
            "delta_due": call.delta_due,
            "status": call.status.value,
            "result": mapping.seal_of_call(cipher, "result", id, call.result),
            "batch": call.batch,
            "now": call.last_event_at,
            "session": session_id,
            "turn": call.turn,
            "position": call.position,
        },
    )
