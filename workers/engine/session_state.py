"""A session's state on the wire: everything of it that is not a row."""

import torch

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.cache.active_cache import ActiveCache
from workers.engine.session import Selection, WorkerSession
from workers.generation import convert as wire_values


def take_state(session: WorkerSession, state: wire.SessionState) -> None:
    """Make a session that has no slot be as `state` says."""
    session.length = state.length
    session.selection = selection_of(state)
    session.eviction_scores = torch.empty(0)
    if state.length:
        session.eviction_scores = torch.frombuffer(
            bytearray(state.eviction_scores), dtype=torch.float32
        )
    session.promoted_rows = state.promoted_rows
    session.pending = list(state.pending)
    session.episode = state.episode
    session.patched_prompt = list(state.patched_prompt)
    session.segments = wire_values.to_near(state.segments)
    session.recent = [wire_values.to_chat(message) for message in state.recent]


def selection_of(state: wire.SessionState) -> Selection | None:
    """The rows that were active; None before anything was said."""
    return Selection.from_bytes(state.selection) if state.length else None


def snapshot(session: WorkerSession, cache: ActiveCache) -> wire.SessionState:
    """What `take_state` takes, to be committed."""
    selection = session.selected(cache)
    return wire.SessionState(
        length=session.length,
        pending=session.pending,
        selection=selection.to_bytes() if selection else b"",
        eviction_scores=session.scores_of_evicted().numpy().tobytes(),
        promoted_rows=session.promoted_rows,
        recent=[wire_values.to_wire(message) for message in session.recent],
        episode=session.episode,
        patched_prompt=session.patched_prompt,
        segments=wire_values.to_spans(session.segments),
    )
