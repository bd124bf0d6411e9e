"""States and rows of sessions, to be compared."""

from collections.abc import Sequence
from typing import Any

import torch

from kvrecall.domain.page_ids import ID_BYTES, is_random, join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb


def comparable(state: pb.SessionState) -> pb.SessionState:
    """A copy of a state in which all random page ids are the same."""
    copy = pb.SessionState()
    copy.CopyFrom(state)
    ids = [bytes(ID_BYTES) if is_random(id) else id for id in split_ids(state.page_ids)]
    copy.page_ids = join_ids(ids)
    return copy


def full_rows(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The rows of transformers' own cache over these tokens, in the store's form."""
    with torch.no_grad():
        cache = model(torch.tensor([list(token_ids)]), use_cache=True).past_key_values
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
