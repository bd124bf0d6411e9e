"""A session's state on the wire: everything but its rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import ActiveCache
from workers.engine.eviction_scores import EvictionScores
from workers.engine.selection import Selection
from workers.engine.session import WorkerSession
from workers.errors import IncompatibleState

# Version of the bytes in a SessionState: the selection's safetensors and the eviction scores. In
# version 1 the scores are float32 `[length]`, 0 for none; in version 2 `EvictionScores.to_bytes`.
# Absent (0) is read as 1: states committed before the field existed have the same form.
STATE_VERSION = 2
_SPARSE_SCORES = 2


def restore_state(session: WorkerSession, state: pb.SessionState) -> None:
    """Give a session without a slot the committed `state`. Raises IncompatibleState."""
    session.selection = selection_from_state(state)
    session.length = state.length
    session.eviction_scores = read_scores(state, session.config.budget)
    session.promoted_rows = state.promoted_rows
    session.pending = list(state.pending)
    session.unsettled = state.unsettled
    session.deferred_signal = list(state.deferred_signal)
    session.episode = convert.active_episode_from_wire(
        state.episode, state.patched_prompt, state.segments
    )
    session.recent = [convert.to_chat(message) for message in state.recent]


def selection_from_state(state: pb.SessionState) -> Selection | None:
    """The rows that were active; None for a session without tokens.

    Raises IncompatibleState for a state of a newer version, and for bytes that are no selection.
    """
    if state.state_version > STATE_VERSION:
        raise IncompatibleState(
            f"the session's state has version {state.state_version}, this worker reads versions "
            f"up to {STATE_VERSION}: upgrade this worker"
        )
    with _reading("selection"):
        return Selection.from_bytes(state.selection) if state.selection else None


def build_state(session: WorkerSession, cache: ActiveCache) -> pb.SessionState:
    """Build the state that `restore_state` reads, to be committed."""
    selection = session.active_selection(cache)
    return pb.SessionState(
        state_version=STATE_VERSION,
        length=session.length,
        pending=session.pending,
        unsettled=session.unsettled,
        selection=selection.to_bytes() if selection else b"",
        eviction_scores=session.eviction_scores.to_bytes() if selection else b"",
        promoted_rows=session.promoted_rows,
        recent=[convert.chat_to_wire(message) for message in session.recent],
        deferred_signal=session.deferred_signal,
        episode=session.episode.id,
        patched_prompt=session.episode.patched_prompt,
        segments=convert.segments_to_wire(session.episode.segments),
        layer_rows=session.config.layer_rows if session.config.split == "sensitivity" else (),
    )


def read_scores(state: pb.SessionState, limit: int) -> EvictionScores:
    """Read the eviction scores, of a state of version 1 the `limit` highest.

    Raises IncompatibleState for bytes that are none.
    """
    with _reading("eviction scores"):
        if state.state_version >= _SPARSE_SCORES:
            return EvictionScores.from_bytes(state.eviction_scores)
        if not state.eviction_scores:
            return EvictionScores()
        scores = torch.frombuffer(bytearray(state.eviction_scores), dtype=torch.float32)
        return EvictionScores.from_dense(scores, limit)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raise IncompatibleState for a part of a state that cannot be parsed."""
    try:
        yield
    except (SafetensorError, KeyError, ValueError) as error:
        raise IncompatibleState(f"the {what} of the session's state cannot be read") from error
