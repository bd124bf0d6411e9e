"""A catalog in the memory of one process, for tests."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from uuid import uuid4

from kvrecall.domain.errors import (
    CatalogError,
    UnknownCall,
    UnknownEpisode,
)
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from kvrecall.testing._catalog_changes import append_turn, mark_done, pair_built
from kvrecall.testing._catalog_state import CatalogState, StoredSession, measure_turns
from kvrecall.testing._in_memory_keys import InMemoryApiKeys
from kvrecall.testing._in_memory_responses import InMemoryConversations, InMemoryResponses
from kvrecall.testing._in_memory_sessions import InMemorySessions
from services.catalog.claims import Claims
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    HistoryEntry,
    IdempotencyKey,
    IdempotencyRecord,
    KnownPrefix,
    Lease,
    OrphanedPages,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
    SegmentsCommit,
    SettleCommit,
    TurnCommit,
)
from services.catalog.serialization import unpack


class InMemoryCatalog:
    """A `Catalog` in plain dicts. It raises the errors that the durable catalogs raise.

    Several services may share one, as gateways share a Redis. It ends with its process.
    """

    def __init__(self) -> None:
        state = CatalogState()
        claims = Claims()
        self.id = uuid4().hex
        self.sessions = InMemorySessions(state, claims)
        self.leases = InMemoryLeases(state, claims)
        self.turns = InMemoryTurns(state)
        self.histories = InMemoryHistories(state)
        self.responses = InMemoryResponses(state)
        self.conversations = InMemoryConversations(state)
        self.expiry = InMemoryExpiry(state)
        self.tool_calls = InMemoryToolCalls(state)
        self.repairs = InMemoryRepairs(state)
        self.episodes = InMemoryEpisodes(state)
        self.page_refs = InMemoryPageRefs(state)
        self.idempotency = InMemoryIdempotency(state)
        self.api_keys = InMemoryApiKeys()

    async def has_room(self) -> bool:
        """Return True: it grows as its process does."""
        return True

    async def close(self) -> None:
        """Do nothing: the sessions stay readable."""


class InMemoryLeases:
    """Claims and epochs."""

    def __init__(self, state: CatalogState, claims: Claims) -> None:
        self._state = state
        self._claims = claims

    async def claim(self, session_id: str, holder: str, seconds: float) -> Lease:
        """Claim the session, or extend the holder's claim. Raises SessionBusy, UnknownSession."""
        session = self._state.get(session_id).session
        self._claims.acquire(session_id, holder, seconds)
        return Lease(session.epoch, session.worker)

    async def release(self, session_id: str, holder: str) -> None:
        """Release the holder's claim."""
        self._claims.release(session_id, holder)

    async def take_over(self, session_id: str, worker: str) -> int:
        """Start a new epoch and return it. Raises UnknownSession."""
        stored = self._state.get(session_id)
        epoch = stored.session.epoch + 1
        stored.session = replace(stored.session, epoch=epoch, worker=worker)
        return epoch


class InMemoryTurns:
    """The turn log of each session."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append a turn with everything it changes. Raises UnknownSession, StaleEpoch, QuotaExceeded."""
        turn = commit.turn
        stored = self._state.get_fenced(turn.session, epoch)
        if turn.number != stored.session.turns + 1:
            raise CatalogError(
                f"turn {turn.number} of session {turn.session!r} cannot follow turn "
                f"{stored.session.turns}"
            )
        self._state.require_new_record(record)
        tokens = turn.outcome.memory.length - stored.session.memory.length
        size = measure_turns([turn])
        tenant = stored.session.settings.tenant
        self._state.require_room(tenant, limits, tokens=tokens, bytes=size)
        append_turn(stored, commit)
        if commit.history:
            entry = HistoryEntry(commit.history, turn.session, turn.number)
            self._state.histories[commit.history] = entry
        if commit.prefix is not None:
            self._state.prefixes.setdefault(commit.digest, commit.prefix)
        self._state.store_record(record)

    async def commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        """Replace the worker state and the memory report. Raises UnknownSession, StaleEpoch."""
        stored = self._state.get_fenced(session_id, epoch)
        stored.worker_state = commit.worker_state
        stored.set_memory(commit.memory)
        stored.add_commit_point()

    async def get_after(self, session_id: str, number: int, limit: int) -> list[Turn]:
        """Return up to `limit` turns that follow turn `number`, in order."""
        stored = self._state.sessions.get(session_id)
        turns = [] if stored is None else stored.turns
        return [turn for turn in turns if turn.number > number][:limit]

    async def get_state(self, session_id: str, number: int) -> bytes | None:
        """Return the serialized pb.SessionState at the end of turn `number`, if it was kept."""
        stored = self._state.sessions.get(session_id)
        packed = None if stored is None else stored.states.get(number)
        return None if packed is None else unpack(packed)

    async def get_token_ids(self, session_id: str) -> tuple[int, ...]:
        """Return all tokens that the session's turns appended. Raises UnknownSession."""
        turns = self._state.get(session_id).turns
        return tuple(token for turn in turns for token in turn.token_ids)


class InMemoryHistories:
    """Sessions by the digests of their conversations."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def find(self, digests: Sequence[str]) -> list[HistoryEntry]:
        """Return the known ones of these digests, in their order."""
        return [self._state.histories[each] for each in digests if each in self._state.histories]


class InMemoryExpiry:
    """Sessions that are deleted after a time without a turn."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired."""
        now = time.time()
        return [each.to_session() for at, each in self._sort() if at <= now][:limit]

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        sessions = [stored.to_session() for _, stored in self._sort()]
        return [each for each in sessions if each.settings.tenant == tenant][:limit]

    def _sort(self) -> list[tuple[float, StoredSession]]:
        sessions = self._state.sessions.values()
        expiring = [(each.expires_at, each) for each in sessions if each.expires_at is not None]
        return sorted(expiring, key=lambda entry: entry[0])


class InMemoryToolCalls:
    """Tool calls and what clients report of them."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def get(self, session_id: str, call_id: str) -> PendingCall:
        """Return the newest call of that id. Raises UnknownCall."""
        stored = self._state.sessions.get(session_id)
        calls = [] if stored is None else list(stored.calls.values())
        found = [call for call in calls if call.call.id == call_id]
        if not found:
            raise UnknownCall(session_id, call_id)
        return max(found, key=lambda call: (call.turn, -call.position))

    async def get_pieces(
        self, session_id: str, call: PendingCall, first: int, limit: int
    ) -> tuple[str, ...]:
        """Return pieces of a call's output from `first` on, up to the first missing one."""
        pieces = self._state.get_pieces(session_id, call)
        indices = takewhile(pieces.__contains__, range(first, first + limit))
        return tuple(pieces[index] for index in indices)

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
        stored = self._state.get_fenced(session_id, epoch)
        self._state.require_new_record(record)
        size = 0 if piece is None else len(piece[1].encode())
        self._state.require_room(stored.session.settings.tenant, limits, bytes=size)
        stored.size += size
        before = stored.calls.get((call.turn, call.position))
        if before is not None:
            reported = replace(
                call.stamped(time.time()),
                call_signal=before.call_signal,
                delta_repaired=before.delta_repaired,
                result_repaired=before.result_repaired,
                consumed_in_turn=before.consumed_in_turn,
            )
            stored.put_call(reported)
        if piece is not None:
            stored.pieces.setdefault((call.turn, call.position), {}).update([piece])
        self._state.store_record(record)

    async def get_time(self) -> float:
        """Return the time of the clock that events are stored under."""
        return time.time()

    async def get_idle_sessions(self, since: float) -> list[str]:
        """Return the sessions with a pending call without an event after `since`."""
        return [
            id
            for id, stored in self._state.sessions.items()
            if any(
                call.status is CallStatus.PENDING and call.last_event_at <= since
                for call in stored.get_open_calls()
            )
        ]


class InMemoryRepairs:
    """Repairs that were run, and which ones are still due."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Store the result of a repair. Raises UnknownSession, StaleEpoch."""
        stored = self._state.get_fenced(session_id, epoch)
        mark_done(stored, commit.repair)
        if commit.worker_state is not None:
            stored.worker_state = commit.worker_state
        if commit.memory is not None:
            stored.set_memory(commit.memory)
        if commit.report is not None:
            stored.add_repair(stored.session.turns + 1, commit.report, commit.details)

    async def get_latest(self, session_id: str, limit: int) -> list[RepairRecord]:
        """Return up to `limit` retained repairs, newest first. Raises UnknownSession."""
        return self._state.get(session_id).repairs[::-1][:limit]


class InMemoryEpisodes:
    """Segments and episodes of each session."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def get(self, session_id: str) -> EpisodeSet:
        """Return the session's episodes without their rows. Raises UnknownSession."""
        return self._state.get(session_id).episodes

    async def get_segments(self, session_id: str) -> list[SegmentRecord]:
        """Return all embedded segments, in time order."""
        stored = self._state.sessions.get(session_id)
        segments = {} if stored is None else stored.segments
        return [segments[number] for number in sorted(segments)]

    async def get_built(self, session_id: str, episode_id: str) -> bytes:
        """Return a serialized pb.Episode. Raises UnknownEpisode."""
        stored = self._state.sessions.get(session_id)
        if stored is None or episode_id not in stored.built:
            raise UnknownEpisode(session_id, episode_id)
        return stored.built[episode_id]

    async def commit_segments(self, session_id: str, commit: SegmentsCommit, epoch: int) -> None:
        """Add segments. Raises UnknownSession, StaleEpoch, CatalogError for a known number."""
        stored = self._state.get_fenced(session_id, epoch)
        new = {segment.number: segment for segment in commit.segments}
        if len(new) < len(commit.segments) or new.keys() & stored.segments.keys():
            raise CatalogError(f"session {session_id!r} has a segment of that number already")
        grown = {episode.id: episode for episode in commit.episode_set.episodes}
        episodes = tuple(
            replace(grown.get(episode.id, episode), matched=episode.matched)
            for episode in stored.episodes.episodes
        )
        active = stored.episodes.active
        stored.segments |= new
        stored.episodes = replace(commit.episode_set, episodes=episodes, active=active)

    async def commit_build(self, session_id: str, commit: BuildCommit, epoch: int) -> None:
        """Replace the episodes. Raises UnknownSession, StaleEpoch."""
        stored = self._state.get_fenced(session_id, epoch)
        built = dict(pair_built(commit.episode_set, commit.built))
        labels = dict(enumerate(commit.labels))
        stored.segments = {
            number: replace(segment, label=labels.get(number, segment.label))
            for number, segment in stored.segments.items()
        }
        stored.built = built
        stored.episodes = replace(commit.episode_set, active=stored.episodes.active)

    async def clear(self, session_id: str, epoch: int) -> None:
        """Delete segments and episodes; the count of builds and the active episode stay."""
        stored = self._state.get_fenced(session_id, epoch)
        before = stored.episodes
        stored.episodes = EpisodeSet(builds=before.builds, active=before.active)
        stored.segments = {}
        stored.built = {}


class InMemoryPageRefs:
    """References to pages of other sessions, and pages without references."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def reserve(self, session_id: str, shared: SharedPages) -> bool:
        """Reference pages before use; False if they are gone. Raises UnknownSession."""
        stored = self._state.get(session_id)
        if not self._state.have_pages(shared):
            return False
        before = stored.reserved.get(shared.owner, 0)
        stored.reserved[shared.owner] = max(before, shared.pages)
        return True

    async def get_prefix(self, digest: str) -> KnownPrefix | None:
        """Return the prefix offered under this digest."""
        return self._state.prefixes.get(digest)

    async def get_retained(self) -> list[SharedPages]:
        """Return the deleted sessions whose pages are still referenced."""
        retained = [
            SharedPages(owner, self._state.count_used(owner))
            for owner in sorted(self._state.retained)
        ]
        return [each for each in retained if each.pages]

    async def find_unknown(self, session_ids: Sequence[str]) -> list[OrphanedPages]:
        """Return those of the sessions that do not exist, with their pages that are referenced."""
        return [
            OrphanedPages(id, self._state.count_used(id))
            for id in session_ids
            if id not in self._state.sessions
        ]

    async def begin_creation(self, session_id: str) -> None:
        """Note that workers write pages of a session before it is committed."""
        self._state.creations[session_id] = time.monotonic()

    async def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet."""
        return self._state.get_orphaned()

    async def confirm_deleted(self, orphaned: OrphanedPages) -> None:
        """Note that these pages are deleted; a later note that keeps fewer pages stays."""
        if self._state.orphaned.get(orphaned.session) == orphaned.keep_pages:
            del self._state.orphaned[orphaned.session]


class InMemoryIdempotency:
    """Responses to requests."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def get(self, key: IdempotencyKey) -> str | None:
        """Return the stored response. Raises IdempotencyConflict when the body differs."""
        return self._state.get_response(key)
