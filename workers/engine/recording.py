"""Records of a forward pass: the rows and observations of each of its sessions, its sparse attention."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import BlockAttention, ForwardStep, RowRetrieval
from workers.engine.eviction.accumulation import received_weights
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.settings import WorkerSettings
from workers.native.attention import NativeAttention
from workers.primitives.observation import Observed, RecentQueries
from workers.retrieval.device_search import DeviceSearch
from workers.retrieval.step import RetrievalStep


@dataclass(frozen=True)
class Recorded:
    """A session's part of a forward pass, before the session changes.

    Attributes:
        queries: The observation window with the new tokens.
        block: Token ids appended since the last eviction, with the new ones.
        received: Per layer the weight that each row received, float32 `[n_kv_heads, n]`, for
            methods that accumulate; empty for the others.
        rows: The new rows, `[n_layers, 2, n_kv_heads, t, head_dim]`.
    """

    queries: RecentQueries
    block: list[int]
    received: list[Tensor]
    rows: Tensor


def record(
    cache: ActiveCache,
    resident: ResidentSession,
    token_ids: Tensor,
    step: ForwardStep,
    index: int,
    settings: WorkerSettings,
) -> Recorded:
    """Record the step's `index`-th session, which got `token_ids` int64 `[t]`; change nothing."""
    session = resident.session
    observation = session.config.method.observation
    positions = step.query_positions[index]
    window = copy(session.queries)
    if window.width:
        window.push(step.observed_queries[index], positions)
    block = session.block
    if observation.repeats_block:
        block = [*block, *token_ids.tolist()][-settings.block_tokens :]
    received = list[Tensor]()
    if observation.accumulate:
        queries = [layer_queries[index] for layer_queries in step.observed]
        received = received_weights(
            cache, resident.slot, queries, positions, observation.accumulate, session.again
        )
    return Recorded(window, block, received, step.rows[index])


def observe_prompt(step: ForwardStep) -> Observed:
    """A patched prompt's queries and their softmax weight on the prompt's own keys.

    Methods may count this weight into the softmax over the active rows.
    """
    return Observed.of_prompt(
        [queries[0] for queries in step.observed],
        [keys[0] for keys in step.new_keys],
        step.query_positions[0],
    )


def begin(
    step: ForwardStep,
    residents: Sequence[ResidentSession],
    attention: BlockAttention | None,
    native: NativeAttention | None,
    on_device: DeviceSearch | None,
) -> None:
    """Give a pass the attention of its block, and its retrieval, as far as its sessions have them.

    Steps that retrieve are computed by `on_device`, those that it does not take by `native`, all others by torch.
    """
    step.block_attention = attention
    step.retrieval = _begin_retrieval(step, residents, native, on_device)


def _begin_retrieval(
    step: ForwardStep,
    residents: Sequence[ResidentSession],
    native: NativeAttention | None,
    on_device: DeviceSearch | None,
) -> RowRetrieval | None:
    """Begin the retrieval of a pass; None if none of its sessions retrieves.

    Retrieved rows count towards a session's bound and its peak.
    """
    ready = [each.session.find_retriever() for each in residents]
    if not any(ready):
        return None
    cache, slots = step.cache, step.slot_list
    found = torch.tensor([0 if each is None else each.count for each in ready])
    cache.require_bound(slice(None), slots, cache.lengths[:, slots] + found[:, None])
    seen = None if step.placement is None else step.placement.seen
    by_host = RetrievalStep(ready, cache.transfers, native, seen)
    if on_device is None or seen is not None:
        return by_host
    return on_device.begin(ready, by_host) or by_host


def end(step: ForwardStep, residents: Sequence[ResidentSession], metrics: Metrics) -> None:
    """Measure a pass's own attention and retrieval; its sessions' capabilities take what it found."""
    for part in (step.block_attention, step.retrieval):
        if part is not None:
            part.measure(metrics)
    for resident in residents:
        for capability in resident.session.capabilities:
            capability.end_pass(step)


def observed_tokens(session: WorkerSession, tokens: int) -> int:
    """Count the newest tokens, of `tokens`, whose queries the session's method observes."""
    accumulates = session.config.method.observation.accumulate
    return tokens if accumulates else session.queries.width
