"""The state of an InMemoryCatalog: sessions in plain dicts, and rules that span them."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from kvrecall.domain.errors import (
    CatalogError,
    IdempotencyConflict,
    StaleEpoch,
    UnknownSession,
)
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.quota import COUNTABLES, UNLIMITED, TenantLimits, TenantUse
from services.catalog.records import (
    CREATION_SECONDS,
    REPAIRS_RETAINED,
    CallPosition,
    EpisodeSet,
    HistoryEntry,
    IdempotencyKey,
    IdempotencyRecord,
    KnownPrefix,
    OrphanedPages,
    RepairDetails,
    RepairRecord,
    SegmentRecord,
)
from services.catalog.responses.base import (
    StoredConversation,
    StoredItem,
    StoredResponse,
    measure,
)
from services.catalog.serialization import MESSAGES, encode_tokens


@dataclass
class StoredSession:
    """A session with all that belongs to it.

    Calls and their pieces are by turn and position, `history` is the committed length by epoch.
    """

    session: Session
    worker_state: bytes
    turns: list[Turn] = field(default_factory=list)
    calls: dict[CallPosition, PendingCall] = field(default_factory=dict)
    pieces: dict[CallPosition, dict[int, str]] = field(default_factory=dict)
    repairs: list[RepairRecord] = field(default_factory=list)
    episodes: EpisodeSet = field(default_factory=EpisodeSet)
    segments: dict[int, SegmentRecord] = field(default_factory=dict)
    built: dict[str, bytes] = field(default_factory=dict)
    refs: tuple[SharedPages, ...] = ()
    reserved: dict[str, int] = field(default_factory=dict)
    history: dict[int, int] = field(default_factory=dict)
    expires_at: float | None = None
    states: dict[int, bytes] = field(default_factory=dict)

    # The bytes of its log, as its tenant's quota counts them.
    size: int = 0

    def to_session(self) -> Session:
        """Return the session as last committed."""
        turns = self.session.turns
        return replace(
            self.session,
            calls=tuple(self.get_open_calls()),
            repairs=tuple(record.report for record in self.repairs if record.turn > turns),
            shared=self.refs,
        )

    def get_open_calls(self) -> list[PendingCall]:
        """Return the calls whose results no turn has consumed, in call order."""
        calls = [self.calls[at] for at in sorted(self.calls)]
        return [call for call in calls if call.consumed_in_turn is None]

    def put_call(self, call: PendingCall) -> None:
        """Add or replace a call."""
        self.calls[call.turn, call.position] = call

    def add_commit_point(self) -> None:
        """Record what is committed under the current epoch."""
        if self.session.memory.rows:
            self.history[self.session.epoch] = self.session.memory.rows

    def set_lifetime(self, seconds: float | None) -> None:
        """Expire in so many seconds from now; None: never."""
        self.expires_at = None if seconds is None else time.time() + seconds

    def set_memory(self, memory: MemoryReport) -> None:
        """Replace the memory report."""
        self.session = replace(self.session, memory=memory)

    def add_repair(self, turn: int, report: RepairReport, details: RepairDetails) -> None:
        """Add a repair that ran for `turn`, and drop the oldest beyond REPAIRS_RETAINED."""
        number = self.repairs[-1].number + 1 if self.repairs else 1
        self.repairs.append(RepairRecord(number, turn, time.time(), report, details))
        del self.repairs[:-REPAIRS_RETAINED]

    def count_pages_of(self, owner: str) -> int:
        """Return how many of an owner's pages the session references or has reserved."""
        pages = [each.pages for each in self.refs if each.owner == owner]
        return max([*pages, self.reserved.get(owner, 0)])


@dataclass(frozen=True)
class StoredRecord:
    """An idempotency record, and the session that its request created (empty: none)."""

    created: str
    fingerprint: str
    response: str


class CatalogState:
    """All sessions, prefixes, page notes and idempotency records."""

    def __init__(self) -> None:
        self.sessions: dict[str, StoredSession] = {}
        self.prefixes: dict[str, KnownPrefix] = {}
        self.retained: dict[str, int] = {}
        self.orphaned: dict[str, int] = {}
        self.histories: dict[str, HistoryEntry] = {}
        self.conversations: dict[str, StoredConversation] = {}
        self.items: dict[str, dict[str, StoredItem]] = {}
        self.responses: dict[str, tuple[StoredResponse, float]] = {}
        # By session, the monotonic time at which its creation began.
        self.creations: dict[str, float] = {}
        self._records: dict[tuple[str, str], StoredRecord] = {}

    def get(self, session_id: str) -> StoredSession:
        """Return a session. Raises UnknownSession."""
        if session_id not in self.sessions:
            raise UnknownSession(session_id)
        return self.sessions[session_id]

    def get_fenced(self, session_id: str, epoch: int) -> StoredSession:
        """Return a session to be written under an epoch. Raises UnknownSession, StaleEpoch."""
        stored = self.get(session_id)
        current = stored.session.epoch
        if current != epoch:
            raise StaleEpoch(
                f"session {session_id!r} is at epoch {current}, not {epoch}: "
                "another process took it over"
            )
        return stored

    def get_pieces(self, session_id: str, call: PendingCall) -> dict[int, str]:
        """Return all pieces of a call's output, by index; none of an unknown session."""
        stored = self.sessions.get(session_id)
        return {} if stored is None else stored.pieces.get((call.turn, call.position), {})

    def add(self, stored: StoredSession) -> None:
        """Add a session. Raises CatalogError when its id is taken."""
        session_id = stored.session.id
        stored.add_commit_point()
        stored.set_lifetime(stored.session.settings.get_lifetime(stored.session.turns))
        if session_id in self.sessions:
            raise CatalogError(f"there is a session {session_id!r} already")
        self.sessions[session_id] = stored

    def get_use(self, tenant: str) -> TenantUse:
        """Return what a tenant has."""
        sessions = [each for each in self.sessions.values() if _is_of(each, tenant)]
        own = [each for each in self.conversations.values() if each.tenant == tenant]
        bodies = [each.body for each, _ in self.responses.values() if each.tenant == tenant]
        return TenantUse(
            sessions=len(sessions),
            conversations=len(own),
            tokens=sum(each.session.memory.length for each in sessions),
            bytes=sum(each.size for each in sessions)
            + sum(measure(self.items[each.id].values()) for each in own)
            + sum(len(body.encode()) for body in bodies),
        )

    def require_room(self, tenant: str, limits: TenantLimits, **added: int) -> None:
        """Raise QuotaExceeded if a tenant may not have so much more."""
        if limits != UNLIMITED:
            use = asdict(self.get_use(tenant))
            after = TenantUse(**{name: use[name] + added.get(name, 0) for name in use})
            limits.check(after, [what for what in COUNTABLES if added.get(what)])

    def have_pages(self, shared: SharedPages) -> bool:
        """Return whether an owner's first pages still exist."""
        if shared.owner in self.sessions:
            return True
        return 0 < shared.pages <= self.count_used(shared.owner)

    def count_used(self, owner: str) -> int:
        """Return how many of an owner's pages any session references."""
        counts = [stored.count_pages_of(owner) for stored in self.sessions.values()]
        return max(counts, default=0)

    def delete(self, session_id: str) -> list[OrphanedPages]:
        """Delete a session; return its orphaned pages, then all others. Raises UnknownSession."""
        self.get(session_id)
        del self.sessions[session_id]
        known = self.prefixes.items()
        self.prefixes = {digest: prefix for digest, prefix in known if prefix.owner != session_id}
        own = OrphanedPages(session_id, self.count_used(session_id))
        changed = [own]
        for owner, pages in self.retained.items():
            used = self.count_used(owner)
            if used < pages:
                changed.append(OrphanedPages(owner, used))
        for each in changed:
            self.retained[each.session] = each.keep_pages
            self.orphaned[each.session] = each.keep_pages
        self.retained = {owner: pages for owner, pages in self.retained.items() if pages}
        return [own, *(each for each in self.get_orphaned() if each != own)]

    def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet."""
        for session, since in list(self.creations.items()):
            if time.monotonic() - since >= CREATION_SECONDS:
                del self.creations[session]
                self.orphaned[session] = 0
        return [OrphanedPages(owner, pages) for owner, pages in sorted(self.orphaned.items())]

    def get_record(self, key: IdempotencyKey) -> StoredRecord | None:
        """Return the valid record under a key, whatever its fingerprint."""
        record = self._records.get((key.scope, key.key))
        if record is None or (record.created and record.created not in self.sessions):
            return None
        return record

    def get_response(self, key: IdempotencyKey) -> str | None:
        """Return the stored response. Raises IdempotencyConflict when the body differs."""
        record = self.get_record(key)
        if record is not None and record.fingerprint != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return None if record is None else record.response

    def require_new_record(self, record: IdempotencyRecord | None) -> None:
        """Check that the key has no valid record yet. Raises CatalogError."""
        if record is not None and self.get_record(record.key) is not None:
            raise CatalogError("the request was answered already; ask for its answer")

    def store_record(self, record: IdempotencyRecord | None, created: str = "") -> None:
        """Store a response; `created` is the session that the request created."""
        if record is not None:
            key = record.key
            stored = StoredRecord(created, key.fingerprint, record.response)
            self._records[key.scope, key.key] = stored


def measure_turns(turns: Iterable[Turn]) -> int:
    """Return the bytes that turns take in the log."""
    return sum(
        len(MESSAGES.dump_json(turn.messages)) + len(encode_tokens(turn.token_ids))
        for turn in turns
    )


def _is_of(stored: StoredSession, tenant: str) -> bool:
    return stored.session.settings.tenant == tenant
