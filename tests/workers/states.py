"""States of sessions, to be compared: but for ids that are random."""

from kvrecall.domain.page_ids import ID_BYTES, is_random, join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb


def comparable(state: pb.SessionState) -> pb.SessionState:
    """A copy of a state in which all random page ids are the same."""
    copy = pb.SessionState()
    copy.CopyFrom(state)
    ids = [bytes(ID_BYTES) if is_random(id) else id for id in split_ids(state.page_ids)]
    copy.page_ids = join_ids(ids)
    return copy
