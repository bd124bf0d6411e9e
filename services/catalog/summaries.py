"""Summaries of pieces of tool output: a call has their numbers, the catalog the pieces."""

from collections.abc import Mapping
from itertools import count, takewhile

from kvrecall.domain.tool_calls import ToolOutput


def summarize_pieces(pieces: Mapping[int, str], delta_due: int) -> ToolOutput:
    """Return the numbers of an output, of which a repair was due up to character `delta_due`."""
    joined = list(takewhile(pieces.__contains__, count()))
    recent = "".join(pieces[index] for index in joined)[delta_due:]
    return ToolOutput(
        pieces=len(pieces),
        size=sum(max(1, len(text.encode())) for text in pieces.values()),
        next_index=1 + max(pieces, default=-1),
        joined=len(joined),
        recent_characters=len(recent),
        recent_bytes=len(recent.encode()),
    )
