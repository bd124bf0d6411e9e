"""Worker states between the wire and the catalog, which stores the ids of the pages apart."""

from kvrecall.domain.page_ids import ID_BYTES, join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog


def pack_state(state: pb.SessionState) -> tuple[bytes, bytes]:
    """Split a worker's state: serialized without the ids of its pages, and these, joined."""
    return _pack(state, b""), state.page_ids


def unpack_state(packed: bytes, page_ids: bytes) -> pb.SessionState:
    """Join what `pack_state` split."""
    state = pb.SessionState.FromString(packed)
    state.page_ids = page_ids
    return state


def pack_kept(state: pb.SessionState) -> bytes:
    """Serialize a state to be kept with its turn: of the pages with the last one, which names all."""
    return _pack(state, state.page_ids[-ID_BYTES:])


def unpack_kept(packed: bytes, page_ids: bytes) -> pb.SessionState | None:
    """Restore what `pack_kept` made, of a session that has these pages now.

    None if a rewrite has dropped pages of the state since.
    """
    state = pb.SessionState.FromString(packed)
    ids = split_ids(page_ids)
    if state.page_ids and state.page_ids not in ids:
        return None
    state.page_ids = join_ids(ids[: ids.index(state.page_ids) + 1]) if state.page_ids else b""
    return state


async def read_state(catalog: Catalog, session_id: str) -> pb.SessionState:
    """Read a session's state as committed last. Raises UnknownSession."""
    packed = await catalog.sessions.get_worker_state(session_id)
    return unpack_state(packed, await catalog.sessions.get_page_ids(session_id))


def _pack(state: pb.SessionState, page_ids: bytes) -> bytes:
    packed = pb.SessionState()
    packed.CopyFrom(state)
    packed.page_ids = page_ids
    return packed.SerializeToString(deterministic=True)
