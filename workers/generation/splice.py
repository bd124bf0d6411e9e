"""Splices: rows of other sessions that a turn has between its own, until it ends.

They are as if their tokens had been prefilled in this place, but for what they were computed behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps


@dataclass(frozen=True, eq=False)
class Splice:
    """Rows that come before one of a prefill's tokens.

    Attributes:
        before: The token, counted from the first that the prefill computes.
        rows: `[n_layers, parts, n_kv_heads, t, head_dim]` on the host; keys are turned to their places.
    """

    before: int
    rows: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens that the rows are of."""
        return self.rows.shape[3]


def append_splice(engine: Engine, resident: ResidentSession, splice: Splice) -> Steps[None]:
    """Append a splice's rows to the session, a block at a time; yields in between.

    From here on the turn's rows are not exact: they are dropped at its end, with the splice. Nothing of it
    is ever written to a tier that lasts.
    """
    session, cache = resident.session, engine.cache
    if session.inexact_from is None:
        session.inexact_from = session.length
    for rows in torch.split(splice.rows, engine.settings.block_tokens, 3):
        start, tokens = session.length, rows.shape[3]
        engine.make_room(resident, tokens)
        at = torch.arange(start, start + tokens, dtype=torch.int32)
        positions = at.expand(cache.shape.n_kv_heads, -1)
        promoted = torch.zeros(positions.shape, dtype=torch.bool)
        for layer, parts in enumerate(rows):
            cache.insert(resident.slot, layer, positions, parts[0], parts[-1], promoted)
        session.length += tokens
        session.side_length = session.length
        session.remembered += tokens
        if session.stored:
            engine.store_io.append(session, start, rows, [], final=False)
        engine.evict(resident)
        yield engine.store_io.backlog(session)
