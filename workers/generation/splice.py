"""Splices: rows of other sessions that a turn has between its own, until it ends.

They are as if their tokens had been prefilled in this place, but for what they were computed behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps


@dataclass(frozen=True, eq=False)
class Splice:
    """What comes before one of a prefill's tokens.

    Attributes:
        before: The token, counted from the first that the prefill computes.
        parts: Rows, `[n_layers, parts, n_kv_heads, t, head_dim]` on the host, with keys turned to their places;
            or the ids of tokens without rows, which are computed.
    """

    before: int
    parts: Sequence[Tensor | Sequence[int]]

    @property
    def tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(count_tokens(part) for part in self.parts)


def count_tokens(part: Tensor | Sequence[int]) -> int:
    """Count the tokens of a part of a splice."""
    return part.shape[3] if isinstance(part, Tensor) else len(part)


def append_rows(engine: Engine, resident: ResidentSession, rows: Tensor) -> Steps[None]:
    """Append a splice's rows to the session, a block at a time; yields in between.

    They are dropped at the turn's end, and are never written to a tier that lasts.
    """
    session, cache = resident.session, engine.cache
    for part in torch.split(rows, engine.settings.block_tokens, 3):
        start, tokens = session.length, part.shape[3]
        engine.make_room(resident, tokens)
        at = torch.arange(start, start + tokens, dtype=torch.int32)
        positions = at.expand(cache.shape.n_kv_heads, -1)
        promoted = torch.zeros(positions.shape, dtype=torch.bool)
        for layer, of_layer in enumerate(part):
            cache.insert(resident.slot, layer, positions, of_layer[0], of_layer[-1], promoted)
        session.length += tokens
        session.side_length = session.length
        if session.stored:
            engine.store_io.append(session, start, part, [], final=False)
        engine.evict(resident)
        yield engine.store_io.backlog(session)
