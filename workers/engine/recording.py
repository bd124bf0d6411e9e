"""Records of a forward pass: the rows and observations of each of its sessions, its sparse attention."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.engine.accumulation import received_weights
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.settings import WorkerSettings
from workers.primitives.observation import Observed, RecentQueries
from workers.sparse.block import SparseBlock


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
            cache, resident.slot, queries, positions, observation.accumulate
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


def begin_sparse(residents: Sequence[ResidentSession], tokens: int) -> SparseBlock | None:
    """Begin the sparse attention of a block of `tokens`, which a prefill appends to one session.

    None for decoding steps and for sessions without it.
    """
    session = residents[0].session
    settings = session.config.sparse
    if len(residents) > 1 or tokens == 1 or not settings.enabled:
        return None
    return SparseBlock(settings, session.config.seed, session.length)


def report_sparse(session: WorkerSession, block: SparseBlock, metrics: Metrics) -> None:
    """Add a block's report to those of the turn, and measure it; nothing if no layer was sparse."""
    if (report := block.report) is not None:
        session.sparse_reports.append(report)
        metrics.observe("worker_prefill_density", report.density_mean)
        metrics.observe("worker_prefill_cover", report.cover_mean)


def observed_tokens(session: WorkerSession, tokens: int) -> int:
    """Count the newest tokens, of `tokens`, whose queries the session's method observes."""
    accumulates = session.config.method.observation.accumulate
    return tokens if accumulates else session.queries.width
