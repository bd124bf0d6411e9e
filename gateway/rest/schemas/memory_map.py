"""The memory map: which tokens are active in which layers and heads, as cells and token by token."""

import base64

from gateway.rest.schemas.base import View
from services.reading.memory_map import MemoryMap, Reason, TokenRecord, TokenRecords

_PROMOTED = 2


class LayerCellsView(View):
    """Cells of a layer in base64, a byte for each column.

    A byte is 0 where no row of the column's tokens is active (or promoted by a repair since the last
    turn), 255 where all are, otherwise 1 to 254 in proportion.
    """

    active: str
    promoted: str


class MemoryMapView(View):
    """Map of the tokens from `start` to `stop` - 1 of a session as committed, in equal columns.

    Column c begins at token start + floor(c * n / columns) of n tokens. The first `sinks` tokens and
    those from `recent_start` on are never evicted. `turn_start` is the first token of the last turn,
    `episode` the active episode, empty without one. `turns`, and `repairs` since the last of them,
    were committed.
    """

    session: str
    length: int
    start: int
    stop: int
    columns: int
    head: int | None
    kv_heads: int
    layers: list[LayerCellsView]
    sinks: int
    recent_start: int
    turn_start: int | None
    episode: str
    turns: int
    repairs: int

    @classmethod
    def from_domain(cls, found: MemoryMap) -> "MemoryMapView":
        """Convert from the domain value."""
        return cls(
            session=found.session.id,
            length=found.length,
            start=found.start,
            stop=found.stop,
            columns=found.columns,
            head=found.head,
            kv_heads=found.kv_heads,
            layers=[
                LayerCellsView(
                    active=base64.b64encode(active).decode(),
                    promoted=base64.b64encode(promoted).decode(),
                )
                for active, promoted in found.layers
            ],
            sinks=found.sinks,
            recent_start=found.recent_start,
            turn_start=found.turn_start,
            episode=found.episode,
            turns=found.session.turns,
            repairs=len(found.session.repairs),
        )


class TokenView(View):
    """Token, the rows that hold it, and why.

    `held` and `promoted` have a mask of KV heads in hexadecimal for each layer: those where its row
    is active, and those where a repair brought it back since the last turn. `rows` of `rows_total`
    are active. `reason` is the first that applies: pending (sampled, not computed yet), evicted (in
    all layers), sink, recent, promoted, turn (of the last turn), episode (in the active one's
    selection), fits (nothing was evicted), kept (by the method). `repairs` are the numbers of the
    retained repairs that promoted it, `repair` is the last of them. `score`: with which it was last
    evicted, where that is among those that are kept.
    """

    position: int
    id: int
    text: str
    turn: int
    side: str
    held: list[str]
    promoted: list[str]
    rows: int
    rows_total: int
    reason: Reason
    detail: str
    repair: int | None
    repairs: list[int]
    score: float | None

    @classmethod
    def from_domain(cls, token: TokenRecord) -> "TokenView":
        """Convert from the domain value."""
        return cls(
            position=token.position,
            id=token.id,
            text=token.text,
            turn=token.turn,
            side=token.side,
            held=[_build_mask(rows, 1) for rows in token.rows],
            promoted=[_build_mask(rows, _PROMOTED) for rows in token.rows],
            rows=token.active_rows,
            rows_total=sum(len(rows) for rows in token.rows),
            reason=token.reason,
            detail=token.detail,
            repair=token.repairs[-1] if token.repairs else None,
            repairs=list(token.repairs),
            score=token.score,
        )


class TokensView(View):
    """Tokens from `start` to `stop` - 1 of a session as committed.

    Of `log_length` tokens of the log `length` are computed; the others are with the next turn.
    """

    session: str
    length: int
    log_length: int
    start: int
    stop: int
    layers: int
    kv_heads: int
    tokens: list[TokenView]

    @classmethod
    def from_domain(cls, found: TokenRecords) -> "TokensView":
        """Convert from the domain value."""
        return cls(
            session=found.session.id,
            length=found.length,
            log_length=found.log_length,
            start=found.start,
            stop=found.start + len(found.tokens),
            layers=found.layers,
            kv_heads=found.kv_heads,
            tokens=[TokenView.from_domain(token) for token in found.tokens],
        )


def _build_mask(rows: tuple[int, ...], least: int) -> str:
    """Build the mask of the heads whose value is `least` or more; the first head is the lowest bit."""
    return f"{sum(1 << head for head, row in enumerate(rows) if row >= least):x}"
