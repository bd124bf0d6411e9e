"""A session's state on the wire: everything but its rows."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from kvrecall.domain.page_ids import join_ids
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import ActiveCache
from workers.engine.eviction_scores import EvictionScores
from workers.engine.selection import Selection
from workers.engine.selection_heads import join_heads, take_heads
from workers.engine.session import WorkerSession
from workers.engine.stored.page_naming import read_ids
from workers.errors import IncompatibleState
from workers.parallel.alone import Alone
from workers.parallel.group import Group

# Version of the bytes in a SessionState: the selection's safetensors and the eviction scores.
STATE_VERSION = 4


def restore_state(session: WorkerSession, state: pb.SessionState, group: Group = Alone()) -> None:
    """Give a session without a slot the committed `state`, as `selection_from_state`."""
    session.selection = selection_from_state(state, group)
    session.length = state.length
    with _reading("page ids"):
        session.page_ids = list(read_ids(state.page_ids))
    session.eviction_scores = read_scores(state)
    session.snapshots = list(state.snapshots)
    session.dropped_tokens = state.dropped_tokens
    session.anchor = state.anchor
    session.promoted_rows = state.promoted_rows
    session.pending = list(state.pending)
    session.unsettled = state.unsettled
    session.deferred_signal = list(state.deferred_signal)
    session.episode = convert.active_episode_from_wire(
        state.episode, state.patched_prompt, state.segments
    )
    session.recent = [convert.to_chat(message) for message in state.recent]


def selection_from_state(state: pb.SessionState, group: Group = Alone()) -> Selection | None:
    """The rows that were active in this rank's heads; None for a session without tokens.

    Raises IncompatibleState for a state of another version (an empty one may have none) and for bytes
    that are no selection.
    """
    version = state.state_version
    if version != STATE_VERSION and (version or state.selection):
        advice = (
            "upgrade this worker" if version > STATE_VERSION else "run the worker that wrote it"
        )
        raise IncompatibleState(
            f"the session's state has version {version}, this worker reads version "
            f"{STATE_VERSION}: {advice}"
        )
    with _reading("selection"):
        return take_heads(Selection.from_bytes(state.selection), group) if state.selection else None


def build_state(session: WorkerSession, cache: ActiveCache) -> pb.SessionState:
    """Build the state that `restore_state` reads, to be committed: with the heads of all ranks."""
    selection = join_heads(session.active_selection(cache), cache.group)
    return pb.SessionState(
        state_version=STATE_VERSION,
        length=session.length,
        page_ids=join_ids(session.page_ids),
        pending=session.pending,
        unsettled=session.unsettled,
        selection=selection.to_bytes() if selection else b"",
        eviction_scores=session.eviction_scores.to_bytes() if selection else b"",
        promoted_rows=session.promoted_rows,
        snapshots=session.snapshots,
        dropped_tokens=session.dropped_tokens,
        anchor=session.anchor,
        recent=[convert.chat_to_wire(message) for message in session.recent],
        deferred_signal=session.deferred_signal,
        episode=session.episode.id,
        patched_prompt=session.episode.patched_prompt,
        segments=convert.segments_to_wire(session.episode.segments),
        layer_rows=session.config.layer_rows if session.config.split == "sensitivity" else (),
    )


def read_scores(state: pb.SessionState) -> EvictionScores:
    """Read the eviction scores. Raises IncompatibleState for bytes that are none."""
    with _reading("eviction scores"):
        return EvictionScores.from_bytes(state.eviction_scores)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raise IncompatibleState for a part of a state that cannot be parsed."""
    try:
        yield
    except (SafetensorError, KeyError, ValueError) as error:
        raise IncompatibleState(f"the {what} of the session's state cannot be read") from error
