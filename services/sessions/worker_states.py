"""Worker states between the wire and the catalog, which stores the ids of the pages apart."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog


def pack_state(state: pb.SessionState) -> tuple[bytes, bytes]:
    """Split a worker's state: serialized without the ids of its pages, and these, joined."""
    without = pb.SessionState()
    without.CopyFrom(state)
    without.ClearField("page_ids")
    return without.SerializeToString(deterministic=True), state.page_ids


def unpack_state(packed: bytes, page_ids: bytes) -> pb.SessionState:
    """Join what `pack_state` split."""
    state = pb.SessionState.FromString(packed)
    state.page_ids = page_ids
    return state


async def read_state(catalog: Catalog, session_id: str) -> pb.SessionState:
    """Read a session's state as committed last. Raises UnknownSession."""
    packed = await catalog.sessions.get_worker_state(session_id)
    return unpack_state(packed, await catalog.sessions.get_page_ids(session_id))
