"""The memory map: which tokens of a committed state are active where, and why. Pure but for reads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvrecall.domain.sessions.session import Session
from kvrecall.domain.utterances import Side
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import RepairRecord
from services.reading.turn_records import TurnRecord

Reason = Literal[
    "pending", "evicted", "sink", "recent", "promoted", "turn", "episode", "fits", "kept"
]
_PROMOTED = 2


@dataclass(frozen=True)
class MemoryMap:
    """Cells of each layer over the tokens `start` .. `stop - 1`, as `pb.MapRowsResult` has them.

    `turn_start` is the first token of the last turn, None before it.
    """

    session: Session
    length: int
    start: int
    stop: int
    head: int | None
    kv_heads: int
    layers: tuple[tuple[bytes, bytes], ...]
    sinks: int
    recent_start: int
    turn_start: int | None
    episode: str

    @property
    def columns(self) -> int:
        """Cells of each layer."""
        return len(self.layers[0][0]) if self.layers else 0


@dataclass(frozen=True)
class TokenRecord:
    """A token, and why it is active or not.

    `rows` has a value per layer and KV head: 1 active, 2 promoted by a repair since the last turn.
    `repairs` are the retained repairs that promoted the token, by number.
    """

    position: int
    id: int
    text: str
    turn: int
    side: Side
    rows: tuple[tuple[int, ...], ...]
    reason: Reason
    detail: str
    repairs: tuple[int, ...]
    score: float | None

    @property
    def active_rows(self) -> int:
        """Rows over all layers and heads."""
        return sum(row > 0 for layer in self.rows for row in layer)


@dataclass(frozen=True)
class TokenRecords:
    """Tokens of a session, of which `length` are computed and `log_length` logged."""

    session: Session
    length: int
    log_length: int
    start: int
    layers: int
    kv_heads: int
    tokens: tuple[TokenRecord, ...]


@dataclass(frozen=True)
class MapContext:
    """All that the reasons of a session's tokens follow from, beside its rows."""

    session: Session
    state: pb.SessionState
    sinks: int
    recent: int
    turns: Sequence[TurnRecord]
    turn_start: int
    promoted_by: Mapping[int, tuple[RepairRecord, ...]] = field(default_factory=dict)


def index_repairs(repairs: Sequence[RepairRecord]) -> dict[int, tuple[RepairRecord, ...]]:
    """Index repairs by the positions that they promoted, each position's in their order."""
    found: dict[int, tuple[RepairRecord, ...]] = {}
    for record in repairs:
        for position in record.details.positions:
            found[position] = (*found.get(position, ()), record)
    return found


def explain(
    context: MapContext, position: int, rows: Sequence[int], score: float | None
) -> tuple[Reason, str]:
    """Return why a token's rows are active or not: the first reason that applies, and a sentence."""
    state, session = context.state, context.session
    reasons: list[tuple[bool, Reason, str]] = [
        (position >= state.length, "pending", _describe_pending(state, position)),
        (not any(rows), "evicted", _describe_eviction(score)),
        (
            position < context.sinks,
            "sink",
            f"one of the first {context.sinks} tokens, which are never evicted",
        ),
        (
            position >= state.length - context.recent,
            "recent",
            f"one of the newest {context.recent} tokens, which are never evicted",
        ),
        (_PROMOTED in rows, "promoted", _describe_promotion(context, position)),
        (
            position >= context.turn_start,
            "turn",
            "of the last turn, whose tokens are protected while it runs",
        ),
        (bool(state.episode), "episode", f"kept for episode {state.episode}"),
        (
            session.memory.evicted_rows == 0,
            "fits",
            "nothing was evicted: the session is within its budget",
        ),
    ]
    for applies, reason, detail in reasons:
        if applies:
            return reason, detail
    return "kept", f"kept by {session.settings.method}"


def build_tokens(
    context: MapContext,
    start: int,
    mapped: pb.MapRowsResult,
    texts: Sequence[str],
    layers: int,
    heads: int,
) -> tuple[TokenRecord, ...]:
    """Join the rows of the tokens from `start` on with their texts, turns and reasons."""
    ids = _read_tokens(context.turns, start, len(texts))
    size = layers * heads
    tokens = []
    for index, ((token, turn, side), text) in enumerate(zip(ids, texts, strict=True)):
        rows = mapped.rows[index * size : (index + 1) * size] or bytes(size)
        score = mapped.scores[index] if index < len(mapped.scores) else math.nan
        known = None if math.isnan(score) else score
        reason, detail = explain(context, start + index, rows, known)
        tokens.append(
            TokenRecord(
                position=start + index,
                id=token,
                text=text,
                turn=turn,
                side=side,
                rows=tuple(tuple(rows[at : at + heads]) for at in range(0, len(rows), heads)),
                reason=reason,
                detail=detail,
                repairs=tuple(
                    record.number for record in context.promoted_by.get(start + index, ())
                ),
                score=known,
            )
        )
    return tuple(tokens)


def get_token_ids(turns: Sequence[TurnRecord], start: int, stop: int) -> list[int]:
    """Return the ids of the tokens `start` .. `stop - 1` of consecutive turns."""
    return [token for token, _, _ in _read_tokens(turns, start, stop - start)]


def _read_tokens(
    turns: Sequence[TurnRecord], start: int, count: int
) -> list[tuple[int, int, Side]]:
    """Read ids, turns and sides of tokens."""
    found: list[tuple[int, int, Side]] = []
    for record in turns:
        for span in record.spans:
            first, last = max(span.start, start), min(span.stop, start + count)
            ids = record.turn.token_ids[first - record.start : max(first, last) - record.start]
            found += [(token, record.turn.number, span.side) for token in ids]
    return found


def _describe_pending(state: pb.SessionState, position: int) -> str:
    if position < state.length + state.unsettled:
        return "of the last turn, and computed again in the pause or with the next turn"
    return "sampled, and computed with the next turn"


def _describe_eviction(score: float | None) -> str:
    known = "" if score is None else f"; its score was {score:.4g}"
    return f"evicted in all layers{known}"


def _describe_promotion(context: MapContext, position: int) -> str:
    records = context.promoted_by.get(position)
    if not records:
        return "brought back by a repair"
    return f"brought back by repair {records[-1].number} ({records[-1].report.trigger})"
