"""What a worker reports of its work, as plain values that can be stored and shown."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvrecall.domain.messages import Message
from kvrecall.protocol.v1 import worker_pb2 as wire


@dataclass(frozen=True)
class RepairReport:
    """One repair: what it looked at and how many tokens it brought back.

    Of `candidates` evicted tokens it scored `scored_rows`: fewer where the others could not have been chosen, or where
    a deadline, or a turn that came, has `cut` it. `demoted` are the rows per KV head, mean over layers, that left the
    active set for what came. `hops` is how often it observed the signal, `bytes_read` counts stored rows. `in_pause`:
    it ended before a turn came.
    """

    trigger: str
    signal_tokens: int
    scored_rows: int
    promoted: int
    seconds: float
    candidates: int = 0
    demoted: int = 0
    cut: bool = False
    hops: int = 0
    bytes_read: int = 0
    in_pause: bool = False

    @property
    def share_scanned(self) -> float:
        """The share of the candidates that was scored; 1.0 when there was none."""
        return self.scored_rows / self.candidates if self.candidates else 1.0


@dataclass(frozen=True)
class MemoryReport:
    """What a session holds. Rows are counted per layer: `active_rows` and its like are the largest layer's."""

    length: int = 0
    budget: int = 0
    active_rows: int = 0
    peak_rows: int = 0
    bound_rows: int = 0
    active_bytes: int = 0
    evicted_rows: int = 0
    promoted_rows: int = 0
    layer_active_rows: tuple[int, ...] = ()
    layer_peak_rows: tuple[int, ...] = ()
    layer_bound_rows: tuple[int, ...] = ()
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    in_slot: bool = False


@dataclass(frozen=True)
class Fidelity:
    """How close a session's next-token distribution was to another's, over recorded assistant tokens."""

    tokens: int
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class EpisodeReport:
    """Which episode a turn was matched with, by what cosine, and what making it active moved.

    A turn that stays in its episode moves nothing. Rows are counted over all layers and KV heads.
    """

    episode: str
    similarity: float
    switched: bool = False
    rows_moved: int = 0
    rows_kept: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TurnOutcome:
    """What a turn came to. It exists only once the turn is committed, and is stored with it.

    `repairs` are those since the turn before; `own_repair` is the last of them if the turn ran it itself.
    `repairs_left_out` counts those that were due and not begun when the turn came. `durable`: the session's rows
    survive their worker; where they do not, they are computed again from the turn log if they are lost.
    """

    session: str
    turn: int
    message: Message | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    memory: MemoryReport
    repairs: tuple[RepairReport, ...]
    seconds: Mapping[str, float]
    fidelity: Fidelity | None = None
    own_repair: RepairReport | None = None
    episode: EpisodeReport | None = None
    repairs_left_out: int = 0
    durable: bool = True


def repair_from_wire(report: wire.RepairReport, in_pause: bool = False) -> RepairReport:
    """The worker's report of one repair."""
    return RepairReport(
        trigger=report.trigger,
        signal_tokens=report.signal_tokens,
        scored_rows=report.scored_rows,
        promoted=len(report.promoted),
        seconds=report.seconds,
        candidates=report.candidates,
        demoted=report.demoted_rows,
        cut=report.cut,
        hops=report.hops,
        bytes_read=report.bytes_read,
        in_pause=in_pause,
    )


def episode_from_wire(episode: str, similarity: float, done: wire.TurnDone) -> EpisodeReport:
    """What a turn that was matched with `episode` reports of it."""
    if not done.HasField("switched"):
        return EpisodeReport(episode, similarity)
    moved = done.switched
    return EpisodeReport(
        episode,
        similarity,
        True,
        moved.rows_moved,
        moved.rows_kept,
        moved.bytes_moved,
        moved.seconds,
    )


def memory_from_wire(report: wire.MemoryReport) -> MemoryReport:
    """The worker's report of what a session holds."""
    return MemoryReport(
        length=report.length,
        budget=report.budget,
        active_rows=_largest(report.active_rows),
        peak_rows=_largest(report.peak_rows),
        bound_rows=_largest(report.bound_rows),
        active_bytes=report.active_bytes,
        evicted_rows=report.evicted_rows,
        promoted_rows=report.promoted_rows,
        layer_active_rows=tuple(report.active_rows),
        layer_peak_rows=tuple(report.peak_rows),
        layer_bound_rows=tuple(report.bound_rows),
        tier_bytes=dict(report.tier_bytes),
        in_slot=report.in_slot,
    )


def fidelity_from_wire(done: wire.TurnDone) -> Fidelity | None:
    """The divergence that the turn asked for, if it did."""
    if not done.HasField("fidelity"):
        return None
    return Fidelity(done.fidelity.tokens, done.fidelity.kl_mean, done.fidelity.top1_agreement)


def _largest(rows: Iterable[int]) -> int:
    return max(rows, default=0)
