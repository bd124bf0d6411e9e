"""The catalog's interface: one small protocol per aggregate, over one durable store.

A commit to the catalog is the acknowledgement: what a method has returned from survives a crash of
the process and of the machine. Each write is one transaction, across aggregates where a commit
changes several. Writes to a session carry the writer's epoch and raise StaleEpoch once another
process has taken the session over. Methods that name a session raise UnknownSession; all raise
CatalogError when the storage fails. A write that is given an idempotency record stores it in the
same transaction.
"""

from collections.abc import Sequence
from typing import Protocol

from kvrecall.domain.page_ids import PageId
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.api_keys import ApiKeys
from services.catalog.encryption.data_keys import DataKeys
from services.catalog.quota import UNLIMITED, TenantLimits, TenantUse
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    HistoryEntry,
    IdempotencyKey,
    IdempotencyRecord,
    Lease,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
    SegmentsCommit,
    SessionDump,
    SessionPage,
    SettleCommit,
    TurnCommit,
)
from services.catalog.responses import Responses, StoredConversations

# Pieces of a call's output that are read at once, where all of them are wanted.
PIECES_AT_ONCE = 64


class Sessions(Protocol):
    """Sessions, from their creation to their deletion."""

    async def create(
        self,
        session: Session,
        worker_state: bytes,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session, whose lease starts with its own `epoch` and `worker`.

        Raises QuotaExceeded if its tenant would be over its limits, however many are added at once:
        so does each write that is given limits.
        """
        ...

    async def get(self, session_id: str, tenant: str | None = None) -> Session:
        """Return the session as last committed. Raises UnknownSession.

        With a `tenant`, another tenant's session is unknown, and takes the same reads as one that
        does not exist: neither the answer nor its time tells them apart.
        """
        ...

    async def get_worker_state(self, session_id: str) -> bytes:
        """Return the serialized pb.SessionState committed last, without the ids of its pages.

        Raises UnknownSession.
        """
        ...

    async def get_page_ids(self, session_id: str) -> bytes:
        """Return the ids of the session's pages, joined (`kvrecall.domain.page_ids`).

        Raises UnknownSession.
        """
        ...

    async def get_page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first.

        Raises InvalidRequest when the cursor is not one of this service.
        """
        ...

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        ...

    async def get_use(self, tenant: str) -> TenantUse:
        """Return what the tenant has; tokens of shared rows count per session.

        With it count writes that have begun: they may have been refused, or have failed.
        """
        ...

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's sessions."""
        ...

    async def count_by_state(self) -> dict[SessionState, int]:
        """Count the idle and the paused sessions of all tenants; at some moment, roughly."""
        ...

    async def fork(
        self,
        commit: ForkCommit,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session that starts from another, with an `epoch` and `worker` of its own.

        Raises UnknownSession, UnknownTurn, and QuotaExceeded as `create`.
        """
        ...

    async def restore(self, dump: SessionDump) -> None:
        """Add a session from another catalog. Raises CatalogError when its id is taken."""
        ...

    async def delete(self, session_id: str, record: IdempotencyRecord | None) -> None:
        """Delete the session; its pages may be dead then (`Pages`). Raises UnknownSession."""
        ...


class Leases(Protocol):
    """The right to work on a session: short claims, and epochs that fence off former writers."""

    async def claim(self, session_id: str, holder: str, seconds: float) -> Lease:
        """Claim the session for `seconds` from now, or extend the holder's own claim.

        Raises SessionBusy while another holder's claim lasts. A claim only spares others useless
        work: safety is the epoch's job and depends on no clock.
        """
        ...

    async def release(self, session_id: str, holder: str) -> None:
        """Release a claim; another holder's claim is left alone."""
        ...

    async def take_over(self, session_id: str, worker: str) -> int:
        """Become the session's writer, with its rows in `worker`; return the new, higher epoch."""
        ...


class Turns(Protocol):
    """The turn log of each session."""

    async def commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append a turn with everything it changes, in one transaction.

        It replaces the worker state, counts the matched episode, consumes the results of the pause
        before it and begins a pause if the turn ended on tool calls.
        """
        ...

    async def commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        """Replace the worker state and the memory report. Raises UnknownSession, StaleEpoch."""
        ...

    async def get_after(self, session_id: str, number: int, limit: int) -> list[Turn]:
        """Return up to `limit` turns that follow turn `number`, in order."""
        ...

    async def get_state(self, session_id: str, number: int) -> bytes | None:
        """Return what a turn's commit kept of the serialized pb.SessionState (`KeptState`), if it did."""
        ...

    async def get_token_ids(self, session_id: str) -> tuple[int, ...]:
        """Return all tokens that the session's turns appended. Raises UnknownSession."""
        ...


class Histories(Protocol):
    """The conversations that sessions hold, by the digests that their turns were committed with."""

    async def find(self, digests: Sequence[str]) -> list[HistoryEntry]:
        """Return the known ones of these digests, in their order, in one round trip.

        An entry may name a session that was deleted since. One that was lost with its server costs
        time, no correctness: the history is appended to a new session.
        """
        ...


class Expiry(Protocol):
    """The sessions that are deleted after a time without a turn (`SessionSettings.get_lifetime`)."""

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired."""
        ...

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        ...


class Memories(Protocol):
    """The sessions that remember each other, by the name of their memory (`SessionSettings.memory`)."""

    async def get_newest(self, tenant: str, memory: str, limit: int) -> list[Session]:
        """Return up to `limit` sessions of a tenant's memory, the newest first."""
        ...


class ToolCalls(Protocol):
    """The tool calls that turns ended on, and what clients report of them."""

    async def get(self, session_id: str, call_id: str) -> PendingCall:
        """Return the newest call of that id, consumed or not. Raises UnknownCall."""
        ...

    async def get_pieces(
        self, session_id: str, call: PendingCall, first: int, limit: int
    ) -> tuple[str, ...]:
        """Return the pieces of a call's output from `first` on, up to the first missing one.

        They are `limit` pieces at most.
        """
        ...

    async def commit(
        self,
        session_id: str,
        call: PendingCall,
        epoch: int,
        record: IdempotencyRecord | None,
        piece: tuple[int, str] | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Store the reported state of a call: start, output so far, status, result and batch.

        `piece` is a new piece of its output, with its index. The call's repair progress is left
        alone: a repair may be running meanwhile.
        """
        ...

    async def get_time(self) -> float:
        """Return the time (Unix seconds) of the clock that events are stored under.

        It is one clock for all processes that share the catalog.
        """
        ...

    async def get_idle_sessions(self, since: float) -> list[str]:
        """Return the sessions with a pending call without an event after `since`.

        `since` is a time of `get_time`. An event of a later time than that is a recent one.
        """
        ...


class Repairs(Protocol):
    """Repairs that were run, and which ones are still due."""

    async def commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Replace the worker state and mark the repair as done."""
        ...

    async def get_latest(self, session_id: str, limit: int) -> list[RepairRecord]:
        """Return up to `limit` of the last REPAIRS_RETAINED repairs, newest first.

        Raises UnknownSession.
        """
        ...


class Episodes(Protocol):
    """Segments and episodes of each session."""

    async def get(self, session_id: str) -> EpisodeSet:
        """Return the session's episodes without their rows. Raises UnknownSession."""
        ...

    async def get_segments(self, session_id: str) -> list[SegmentRecord]:
        """Return all embedded segments, in time order."""
        ...

    async def get_built(self, session_id: str, episode_id: str) -> bytes:
        """Return a serialized pb.Episode, with its rows. Raises UnknownEpisode."""
        ...

    async def commit_segments(self, session_id: str, commit: SegmentsCommit, epoch: int) -> None:
        """Add segments. Match counts and the active episode stay as turns committed them."""
        ...

    async def commit_build(self, session_id: str, commit: BuildCommit, epoch: int) -> None:
        """Replace the episodes. The active episode stays as turns committed it."""
        ...

    async def clear(self, session_id: str, epoch: int) -> None:
        """Delete segments and episodes, to be computed again under new ids."""
        ...


class Pages(Protocol):
    """The pages that sessions have, over all tenants.

    A commit that changes a session's pages, a fork, a restored session and a deletion change them
    with it. A page that no session has any more is dead, until the workers have deleted it.
    """

    async def drop_abandoned(self, older_than_seconds: float) -> None:
        """Let go of pages that crashes left to sessions which were never created, or are deleted.

        Younger ones stay: their session may be created yet. Each call looks at some more.
        """
        ...

    async def get_dead(self, limit: int) -> list[PageId]:
        """Return up to `limit` dead pages, oldest first."""
        ...

    async def count_dead(self) -> int:
        """Return the number of dead pages."""
        ...

    async def confirm_deleted(self, ids: Sequence[PageId]) -> None:
        """Note that the workers have deleted these dead pages."""
        ...

    async def find_live(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that some session has, with those of commits that have begun."""
        ...

    async def find_unknown(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that no session has and that are not dead."""
        ...


class Idempotency(Protocol):
    """Responses to requests that carried an idempotency key."""

    async def get(self, key: IdempotencyKey) -> str | None:
        """Return the stored response. Raises IdempotencyConflict when the body differs.

        Returns None as well if the request created a session that no longer exists.
        """
        ...


class Catalog(Protocol):
    """Durable state of all sessions."""

    @property
    def id(self) -> str:
        """A random id, made with the catalog. Workers' pages belong to one catalog."""
        ...

    @property
    def secret(self) -> bytes:
        """Random bytes, made with the catalog, from which the keys of pages' ids are derived."""
        ...

    @property
    def data_keys(self) -> DataKeys:
        """Keys of the tenants that their values are encrypted under."""
        ...

    @property
    def sessions(self) -> Sessions:
        """Sessions, from their creation to their deletion."""
        ...

    @property
    def leases(self) -> Leases:
        """Claims and epochs."""
        ...

    @property
    def turns(self) -> Turns:
        """The turn logs."""
        ...

    @property
    def histories(self) -> Histories:
        """Sessions by the digests of their conversations."""
        ...

    @property
    def responses(self) -> Responses:
        """Stored responses."""
        ...

    @property
    def conversations(self) -> StoredConversations:
        """Conversations that clients name."""
        ...

    @property
    def expiry(self) -> Expiry:
        """Sessions that are deleted after a time without a turn."""
        ...

    @property
    def memories(self) -> Memories:
        """Sessions that remember each other."""
        ...

    @property
    def tool_calls(self) -> ToolCalls:
        """Tool calls of turns."""
        ...

    @property
    def repairs(self) -> Repairs:
        """Repairs that were run."""
        ...

    @property
    def episodes(self) -> Episodes:
        """Segments and episodes."""
        ...

    @property
    def pages(self) -> Pages:
        """Pages of all sessions."""
        ...

    @property
    def idempotency(self) -> Idempotency:
        """Stored responses by idempotency key."""
        ...

    @property
    def api_keys(self) -> ApiKeys:
        """API keys of the tenants."""
        ...

    async def has_room(self) -> bool:
        """Return whether more may be stored; deletions need no room."""
        ...

    async def close(self) -> None:
        """Finish running writes and close the storage."""
        ...
