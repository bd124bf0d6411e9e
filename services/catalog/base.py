"""What sessions exist and what was said in them. A commit to the catalog is the acknowledgement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import DueRepair
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import PendingCall


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's key for one write: `scope` is the call it was sent to, `fingerprint` stands for the body.

    `session` is the one that the call names; empty where it makes one.
    """

    scope: str
    key: str
    fingerprint: str
    session: str = ""


@dataclass(frozen=True)
class Lease:
    """Who writes a session: the epoch of whoever took it over last, and the worker that had it then."""

    epoch: int
    worker: str


@dataclass(frozen=True)
class OrphanedPages:
    """Pages that nobody needs any more: those of `session` but for its first `keep_pages`, which others share."""

    session: str
    keep_pages: int


@dataclass(frozen=True)
class KnownPrefix:
    """A session's first tokens, whose rows a session alike in tenant, settings and first words may share."""

    owner: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ForkCommit:
    """A new session that begins as `parent` was at the end of turn `turns`.

    The parent's turns up to there are copied, and the calls that turn ended on; at its last turn also what is known of
    calls and episodes since, and which repairs were run. `worker_state` is the child's.
    """

    session: Session
    parent: str
    turns: int
    worker_state: bytes


@dataclass(frozen=True)
class IdempotencyRecord:
    """An answer, as JSON text, that is given again to a request with the same key and body."""

    key: IdempotencyKey
    answer: str


@dataclass(frozen=True)
class RepairDetails:
    """What is kept of a repair beside its report: its signal as text, and the positions that it brought back."""

    signal: str = ""
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RepairRecord:
    """A repair of the past: `turn` is the one it was run for, `at` when it was committed (seconds since the epoch)."""

    number: int
    turn: int
    at: float
    report: RepairReport
    details: RepairDetails


REPAIRS_KEPT = 32
"""Repairs that are remembered of a session, the last ones."""


@dataclass(frozen=True)
class TurnCommit:
    """Everything that a turn changes.

    `calls` are the tool calls it ended on; `inline_results` are the results, by call id, that the turn
    itself brought for calls of the pause before. `matched` is the episode it was matched with, `active`
    the one whose rows are active now; empty: none. `repaired` belongs to the turn's own repair,
    if its outcome has one. A first turn also says what pages the session `shared` since, and
    which `prefix` others may share of it, under the `digest` of what it follows from.
    """

    turn: Turn
    worker_state: bytes
    calls: tuple[ToolCall, ...] = ()
    inline_results: Mapping[str, str] = field(default_factory=dict)
    matched: str = ""
    active: str = ""
    repaired: RepairDetails = RepairDetails()
    shared: tuple[SharedPages, ...] | None = None
    prefix: KnownPrefix | None = None
    digest: str = ""


@dataclass(frozen=True)
class RepairCommit:
    """What a repair changed. Without a `worker_state` it was refused or given up: it is done, and nothing moved."""

    repair: DueRepair
    worker_state: bytes | None = None
    report: RepairReport | None = None
    memory: MemoryReport | None = None
    details: RepairDetails = RepairDetails()


@dataclass(frozen=True)
class SegmentRecord:
    """A segment that was embedded: tokens `start` .. `stop - 1`, its vector as little-endian float32.

    Segments are numbered from 0 in time order. `label` is the number of its episode; -1 before there are episodes.
    """

    number: int
    start: int
    stop: int
    vector: bytes
    label: int = -1


@dataclass(frozen=True)
class EpisodeRecord:
    """What an episode is to the service. `centroid` is little-endian float32, the mean of its segments' vectors.

    `medoid` is the transcript of the segment nearest to it. `matched` counts the turns that were matched with it
    since it was built.
    """

    id: str
    centroid: bytes
    segments: int
    tokens: int
    medoid: str
    matched: int = 0


@dataclass(frozen=True)
class EpisodeSet:
    """What is known of a session's episodes; as it stands here, before its first segment.

    `segments` were embedded so far, `built_segments` when the episodes were built last (0: never), in `builds`
    builds. The next segment begins at token `next_token`, after utterance `last_utterance` of turn `last_turn`.
    `dimensions` are those of the vectors. `active` is the episode whose rows are active, perhaps of an earlier build.
    """

    segments: int = 0
    built_segments: int = 0
    builds: int = 0
    next_token: int = 0
    last_turn: int = 1
    last_utterance: int = -1
    dimensions: int = 0
    active: str = ""
    episodes: tuple[EpisodeRecord, ...] = ()


@dataclass(frozen=True)
class SegmentsCommit:
    """Newly embedded segments, with the set as it is with them: its counts, the episodes' centroids and sizes."""

    segments: tuple[SegmentRecord, ...]
    found: EpisodeSet


@dataclass(frozen=True)
class BuildCommit:
    """Newly built episodes, which replace those before: the set with them, and the labels of all segments.

    `built` are the serialised wire.Episodes, in the set's order.
    """

    found: EpisodeSet
    built: tuple[bytes, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class SessionDump:
    """Everything that is known of a session, to be put into another catalog; it shares no pages.

    `calls` are all tool calls, `repairs` the remembered ones, the oldest first, `built` the serialised wire.Episodes
    in the set's order.
    """

    session: Session
    worker_state: bytes
    turns: tuple[Turn, ...]
    calls: tuple[PendingCall, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    episodes: EpisodeSet = EpisodeSet()
    segments: tuple[SegmentRecord, ...] = ()
    built: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class SessionPage:
    """Some sessions, newest first, and the cursor of the rest."""

    sessions: tuple[Session, ...]
    next_cursor: str | None


class Catalog(Protocol):
    """Durable: what a method has returned from survives a crash of the process and of the machine.

    Each write is one transaction. Writes to a session carry the epoch and raise `StaleEpoch` when another process
    took the session over; methods that name a session raise `UnknownSession`; all raise `CatalogError` when the
    storage fails. A write remembers its answer, where one is given, in the same transaction.
    """

    async def create(
        self, session: Session, worker_state: bytes, answer: IdempotencyRecord | None
    ) -> None:
        """Add a session, whose lease begins with its own `epoch` and `worker`."""
        ...

    async def session(self, session: str) -> Session:
        """The session as it was last committed."""
        ...

    async def worker_state(self, session: str) -> bytes:
        """The serialised wire.SessionState that was committed last."""
        ...

    async def page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Up to `limit` sessions of a tenant. Raises InvalidRequest when the cursor is not one of ours."""
        ...

    async def session_ids(self) -> list[str]:
        """Every session there is."""
        ...

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """Up to `limit` turns with numbers over `after`, in order."""
        ...

    async def token_ids(self, session: str) -> tuple[int, ...]:
        """Every token that the session's turns appended, in order. Raises UnknownSession."""
        ...

    async def repairs(self, session: str, limit: int) -> list[RepairRecord]:
        """Up to `limit` of the last `REPAIRS_KEPT` repairs, the newest first. Raises UnknownSession."""
        ...

    async def claim(self, session: str, holder: str, seconds: float) -> Lease:
        """Be the one process that works on the session, for so many seconds; claimed again, it lasts on from now.

        Raises SessionBusy while another holder's claim lasts. It keeps others from starting in vain; that nobody
        writes who was taken over from is the epoch's doing, and depends on no clock.
        """
        ...

    async def release(self, session: str, holder: str) -> None:
        """Give a claim back. Nothing happens to another holder's."""
        ...

    async def take_over(self, session: str, worker: str) -> int:
        """Become the session's writer, with its rows in `worker`: the new epoch, larger than any before."""
        ...

    async def fork(self, commit: ForkCommit, answer: IdempotencyRecord | None) -> None:
        """Add a session that begins as another was, with an `epoch` and `worker` of its own.

        Raises UnknownSession, also when pages that it shares are no more, and UnknownTurn. Its `shared` pages are
        counted before it is there, so a crash leaves none uncounted.
        """
        ...

    async def restore(self, dump: SessionDump) -> None:
        """Add a session as it was somewhere else. Raises CatalogError when there is one of that id."""
        ...

    async def share(self, session: str, shared: SharedPages) -> bool:
        """Count `session` among those that use another's first pages; False when that one is no more.

        To be called before they are used. What a first turn then commits as `shared` replaces it.
        """
        ...

    async def prefix(self, digest: str) -> KnownPrefix | None:
        """What a session with this digest said first, if one is there."""
        ...

    async def kept_pages(self) -> list[SharedPages]:
        """Deleted sessions of which pages are still shared, with how many from the first on."""
        ...

    async def tenant_tokens(self, tenant: str) -> int:
        """Tokens whose rows the tenant's sessions hold, shared ones counted once per session."""
        ...

    async def commit_turn(
        self, commit: TurnCommit, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """Append a turn, replace the worker's state, count the matched episode, and end or begin a pause."""
        ...

    async def commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        """Replace the worker's state and mark the repair as done."""
        ...

    async def call(self, session: str, call: str) -> PendingCall:
        """The newest call of that id, its result said or not. Raises UnknownCall."""
        ...

    async def commit_call(
        self, session: str, call: PendingCall, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """Keep what the client reported of a call: its start, its output so far, status, result, batch; and when.

        Which of the call's repairs are done is left alone: a repair may be running meanwhile.
        """
        ...

    async def silent(self, since: float) -> list[str]:
        """The sessions that wait for a call of which nothing was heard after `since` (seconds since the epoch)."""
        ...

    async def episodes(self, session: str) -> EpisodeSet:
        """What there is of the session's episodes but for their rows. Raises UnknownSession."""
        ...

    async def segments(self, session: str) -> list[SegmentRecord]:
        """Every embedded segment, in time order."""
        ...

    async def built_episode(self, session: str, episode: str) -> bytes:
        """The serialised wire.Episode, with its rows. Raises UnknownEpisode."""
        ...

    async def commit_segments(self, session: str, commit: SegmentsCommit, epoch: int) -> None:
        """Add segments. How often episodes were matched, and which is active, is left as turns committed it."""
        ...

    async def commit_build(self, session: str, commit: BuildCommit, epoch: int) -> None:
        """Replace the episodes. Which one is active is left as turns committed it."""
        ...

    async def forget_episodes(self, session: str, epoch: int) -> None:
        """Drop segments and episodes, so that they are made anew."""
        ...

    async def delete(self, session: str, answer: IdempotencyRecord | None) -> list[OrphanedPages]:
        """Forget the session, all its turns and episodes, and what it shared: the pages that nobody needs now.

        Its own come first. Some of those that `leftovers` gives may come after it.
        """
        ...

    async def leftovers(self) -> list[OrphanedPages]:
        """The pages of deleted sessions that nobody needs, as far as they were not `dropped`."""
        ...

    async def dropped(self, leftover: OrphanedPages) -> None:
        """The workers have let go of these pages."""
        ...

    async def recall(self, key: IdempotencyKey) -> str | None:
        """The answer that was given under this key. Raises IdempotencyConflict for another body.

        None as well where the request made a session that is no more.
        """
        ...

    async def close(self) -> None:
        """Finish running writes and let go of the storage."""
        ...
