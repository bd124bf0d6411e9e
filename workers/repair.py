"""Repair: score what was evicted against what just became known, and bring the best rows back.

RepairKV section 3 and Algorithm 1. Scoring streams the row store twice: once for the softmax's normaliser over
active and evicted rows together, once for the weights, so memory does not grow with the conversation.
"""

import torch
from torch import Tensor

from kvstore.store import RowStore
from workers.cache import EMPTY, ActiveCache
from workers.observation import Observed
from workers.selection import bursts, marks, places_of
from workers.session import WorkerSession
from workers.settings import WorkerSettings
from workers.stored_attention import StoredAttention, stored_keys


def missing_rows(cache: ActiveCache, slot: int, length: int) -> Tensor:
    """Which rows of a session are evicted: bool `[n_layers, n_kv_heads, length]`, on the cache's device."""
    shape = cache.shape
    missing = torch.empty(shape.n_layers, shape.n_kv_heads, length, dtype=torch.bool, device=cache.device)
    for layer in range(shape.n_layers):
        _, _, positions = cache.rows_of(slot, layer)
        missing[layer] = ~marks(positions, length)
    return missing


def score_rows(observed: Observed, store: RowStore, name: str, missing: Tensor) -> Tensor:
    """How much attention the signal would pay to what is missing: float32 `[length]` per token, on the CPU.

    `a_i = mean over layers and heads of max over t of A[t, i]`, A the softmax over all the session's rows, counted
    in those layers and heads that do not hold row i (RepairKV eq. 3; with whole-token eviction exactly the paper's).
    """
    n_layers, n_kv_heads, length = missing.shape
    attention = StoredAttention(observed, n_kv_heads)
    for _, keys in stored_keys(store, name, length, missing.device):
        for layer in range(n_layers):
            attention.add(layer, keys[layer])
    scores = torch.zeros(length, device=missing.device)
    for start, keys in stored_keys(store, name, length, missing.device):
        stop = start + keys.shape[2]
        for layer in range(n_layers):
            weights = attention.weights(layer, keys[layer])
            scores[start:stop] += (weights.amax(2).sum(1) * missing[layer, :, start:stop]).sum(0)
    return scores.div_(n_layers * observed.queries[0].shape[0]).cpu()


def choose(scores: Tensor, missing: Tensor, session: WorkerSession, settings: WorkerSettings) -> Tensor:
    """The tokens to promote, at most the session's `repair_rows`: int64 positions, ascending."""
    return bursts(
        scores,
        missing.any(0).any(0).cpu(),
        session.scores_of_evicted(),
        session.repair_rows,
        before=settings.burst_before,
        after=settings.burst_after,
    )


def promote(cache: ActiveCache, store: RowStore, session: WorkerSession, positions: Tensor, missing: Tensor) -> None:
    """Bring tokens back at their true positions, in every layer and head that misses them."""
    assert session.slot is not None, "only a session in a slot is repaired"
    absent = missing[:, :, positions.to(missing.device)].cpu()
    wanted = [torch.where(absent[layer], positions, -1) for layer in range(cache.shape.n_layers)]
    for layer, (keys, values) in enumerate(store.gather_selection(session.name, wanted)):
        places = torch.where(absent[layer], positions, EMPTY).to(torch.int32)
        cache.insert(session.slot, layer, places, keys, values, absent[layer])
    session.promoted_rows = len(positions)


def withdraw(cache: ActiveCache, session: WorkerSession) -> None:
    """Forget what the last repair brought back: a better signal chooses again from everything."""
    assert session.slot is not None, "only a session in a slot is repaired"
    if not session.promoted_rows:
        return
    for layer in range(cache.shape.n_layers):
        rows = cache.read(session.slot, layer)
        cache.keep(session.slot, layer, places_of((rows.positions != EMPTY) & ~rows.promoted))
    session.promoted_rows = 0
