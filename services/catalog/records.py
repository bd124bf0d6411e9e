"""Values that pass between the services and a catalog."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import DueRepair
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.tool_calls import PendingCall

CallPosition = tuple[int, int]
"""The turn of a tool call, and its position in that turn."""

# The number of repairs a catalog retains per session, the latest ones.
REPAIRS_RETAINED = 32
# Of the turns before the last ones, each whose number is a multiple keeps its worker state.
KEPT_INTERVAL = 16


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's key for one write request.

    `scope` is the operation the key was sent to, `fingerprint` stands for the request body.
    `session` is the session that the request names; empty if the request creates one. `tenant` is
    the sender's, whose own the key is.
    """

    scope: str
    key: str
    fingerprint: str
    session: str = ""
    tenant: str = ""


@dataclass(frozen=True)
class IdempotencyRecord:
    """The response to a request, as JSON text, to be repeated for the same key and body."""

    key: IdempotencyKey
    response: str


@dataclass(frozen=True)
class Lease:
    """The current writer of a session: its epoch, and the worker that held the rows at takeover."""

    epoch: int
    worker: str


@dataclass(frozen=True)
class HistoryEntry:
    """The conversation of which `digest` is the digest: `session` up to the end of turn `turn`."""

    digest: str
    session: str
    turn: int


@dataclass(frozen=True)
class ForkCommit:
    """A new session that starts from `parent` at the end of turn `turns`.

    The parent's turns up to there are copied, with the calls that turn ended on. At the parent's
    last turn the state of calls, the episodes and the repairs since are copied too.
    `worker_state` is the child's serialized pb.SessionState without its page ids, which are
    `page_ids`, joined.
    """

    session: Session
    parent: str
    turns: int
    worker_state: bytes
    page_ids: bytes = b""


@dataclass(frozen=True)
class RepairDetails:
    """Stored with a repair's report: its signal as text, and the token positions it promoted."""

    signal: str = ""
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RepairRecord:
    """A finished repair: `turn` is the turn it ran for, `at` its commit time (Unix seconds)."""

    number: int
    turn: int
    at: float
    report: RepairReport
    details: RepairDetails


@dataclass(frozen=True)
class KeptState:
    """A turn's worker state, to be kept for forks there.

    `packed` by `services.sessions.worker_states.pack_kept` and `serialization.pack`.

    Those of the last `turns` turns are kept, and of every KEPT_INTERVAL-th before.
    """

    packed: bytes
    turns: int

    def get_dropped(self, number: int) -> int | None:
        """Return the turn whose state is dropped when turn `number` is committed, if one is."""
        dropped = number - self.turns
        return None if dropped < 1 or dropped % KEPT_INTERVAL == 0 else dropped


@dataclass(frozen=True)
class TurnCommit:
    """Everything that a turn changes.

    `worker_state` is the serialized pb.SessionState without its page ids, which are `page_ids`, joined:
    those of all of the session's pages.
    `calls` are the tool calls it ended on. `inline_results` are results, by call id, that the turn
    itself brought for calls of the pause before it. `matched` is the episode the turn was matched
    with and `active` the episode whose rows are active now; both empty if there is none.
    `repaired` belongs to the turn's own repair, if its outcome has one. `history` is the digest of
    the conversation up to the turn's end, by which a client's whole history finds the session again
    (empty: it is not looked for). `kept` is the worker state once more, if it is to be kept for forks
    at this turn. `lifetime` is in seconds, after which the session expires unless
    another turn follows (None: never).
    """

    turn: Turn
    worker_state: bytes
    calls: tuple[ToolCall, ...] = ()
    inline_results: Mapping[str, str] = field(default_factory=dict)
    matched: str = ""
    active: str = ""
    repaired: RepairDetails = RepairDetails()
    history: str = ""
    kept: KeptState | None = None
    lifetime: float | None = None
    page_ids: bytes = b""


@dataclass(frozen=True)
class RepairCommit:
    """The result of a repair.

    Without a `worker_state` the repair was refused or given up: it is marked as done and no row
    has moved.
    """

    repair: DueRepair
    worker_state: bytes | None = None
    report: RepairReport | None = None
    memory: MemoryReport | None = None
    details: RepairDetails = RepairDetails()


@dataclass(frozen=True)
class SettleCommit:
    """A session between turns with more rows: those of tokens that its last turn left pending.

    `worker_state` and `page_ids` as of a TurnCommit.
    """

    worker_state: bytes
    memory: MemoryReport
    page_ids: bytes = b""


@dataclass(frozen=True)
class SegmentRecord:
    """An embedded segment: tokens `start` to `stop - 1`, its vector as little-endian float32.

    Segments are numbered from 0 in time order. `label` is the index of the segment's episode, -1
    before episodes are built.
    """

    number: int
    start: int
    stop: int
    vector: bytes
    label: int = -1


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode without its rows.

    `centroid` is the mean of its segments' vectors, as little-endian float32. `medoid` is the
    transcript of the segment nearest to the centroid. `matched` counts the turns matched with the
    episode since it was built.
    """

    id: str
    centroid: bytes
    segments: int
    tokens: int
    medoid: str
    matched: int = 0


@dataclass(frozen=True)
class EpisodeSet:
    """The episodes of a session; the defaults are the state before the first segment.

    `segments` counts the segments embedded so far, `built_segments` those at the last build (0:
    none yet), `builds` the builds. The next segment begins at token `next_token`, after utterance
    `last_utterance` of turn `last_turn`. `dimensions` is the vectors' length. `active` is the
    episode whose rows are active, possibly of an earlier build.
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
    """Newly embedded segments, and the set with them: its counts, centroids and sizes."""

    segments: tuple[SegmentRecord, ...]
    episode_set: EpisodeSet


@dataclass(frozen=True)
class BuildCommit:
    """Newly built episodes that replace the previous ones: the set, and the labels of all segments.

    `built` are the serialized pb.Episode messages, in the set's order.
    """

    episode_set: EpisodeSet
    built: tuple[bytes, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class SessionDump:
    """Everything that a catalog stores of a session, to be restored in another catalog.

    `calls` are all tool calls, `repairs` the retained ones, oldest first, `built` the serialized
    pb.Episode messages in the set's order, `pieces` those of the calls' outputs, by turn and position
    of the call.
    """

    session: Session
    worker_state: bytes
    turns: tuple[Turn, ...]
    calls: tuple[PendingCall, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    episodes: EpisodeSet = EpisodeSet()
    segments: tuple[SegmentRecord, ...] = ()
    built: tuple[bytes, ...] = ()
    pieces: Mapping[CallPosition, Mapping[int, str]] = field(default_factory=dict)
    page_ids: bytes = b""


@dataclass(frozen=True)
class SessionPage:
    """Some sessions, newest first, and the cursor of the next page (None: this is the last)."""

    sessions: tuple[Session, ...]
    next_cursor: str | None
