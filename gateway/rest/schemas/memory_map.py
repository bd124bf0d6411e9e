"""The memory map: which tokens are active in which layers and heads, as cells and token by token."""

import base64

from gateway.rest.schemas.public import copy_to
from kvrecall import client
from services.reading.memory_map import MemoryMap, TokenRecord, TokenRecords

_PROMOTED = 2


def to_memory_map(found: MemoryMap) -> client.MemoryMap:
    """Convert the map of a session."""
    return copy_to(
        client.MemoryMap,
        found,
        session=found.session.id,
        layers=tuple(
            client.LayerCells(
                active=base64.b64encode(active).decode(),
                promoted=base64.b64encode(promoted).decode(),
            )
            for active, promoted in found.layers
        ),
        turns=found.session.turns,
        repairs=len(found.session.repairs),
    )


def to_memory_tokens(found: TokenRecords) -> client.MemoryTokens:
    """Convert the tokens of a session."""
    return copy_to(
        client.MemoryTokens,
        found,
        session=found.session.id,
        stop=found.start + len(found.tokens),
        tokens=tuple(_to_token(token) for token in found.tokens),
    )


def _to_token(token: TokenRecord) -> client.MemoryToken:
    return copy_to(
        client.MemoryToken,
        token,
        held=tuple(_build_mask(rows, 1) for rows in token.rows),
        promoted=tuple(_build_mask(rows, _PROMOTED) for rows in token.rows),
        rows=token.active_rows,
        rows_total=sum(len(rows) for rows in token.rows),
        repair=token.repairs[-1] if token.repairs else None,
    )


def _build_mask(rows: tuple[int, ...], least: int) -> str:
    """Build the mask of the heads whose value is `least` or more; the first head is the lowest bit."""
    return f"{sum(1 << head for head, row in enumerate(rows) if row >= least):x}"
