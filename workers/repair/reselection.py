"""Re-selection: while a session answers, the answer's queries select its rows anew among all stored.

LoopServe section 5.2, Algorithm 6. What was evicted while the prompt was read can return as soon as
the answer asks for it, and leaves again when it does not. Ours is the selection of whole tokens: a
head that will need a row with the next token alone gets it from those that look for it already.
"""

import time
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from kvrecall.domain.session_settings import Reselection
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.activation import LayerSource, RowMoves, become
from workers.engine.engine import Engine
from workers.engine.eviction import protected_rows, record_evicted
from workers.engine.ranking import combine_scores
from workers.engine.session import ResidentSession
from workers.engine.store_io import map_store_errors
from workers.generation.steps import Steps, wait_for_writes
from workers.primitives.scoring import smooth_before
from workers.primitives.selection import top_per_head
from workers.repair.index_scan import scan_index
from workers.repair.scan.exact import HeadReduction, ScanResult, scan_by_head
from workers.repair.scan.pages import PageSource


class StoredRows(LayerSource, PageSource, Protocol):
    """A source of a session's rows and of its pages: `kvstore.store.RowStore`, or one like it."""


def due(reselection: Reselection | None, output_tokens: int) -> bool:
    """Check if a re-selection is due once so many tokens of the answer have rows.

    It depends on nothing else, so that a turn that is run again re-selects at the same tokens.
    """
    if reselection is None or output_tokens < reselection.first:
        return False
    return (output_tokens - reselection.first) % reselection.every == 0


def reselect(
    engine: Engine,
    resident: ResidentSession,
    output_tokens: int,
    report: pb.ReselectionReport,
    source: StoredRows | None = None,
) -> Steps[None]:
    """Make the rows active that the answer's last tokens attend to most, if that is due now.

    All stored rows are candidates, scored in every layer and KV head by the softmax of the last
    `every` queries of the answer over all rows, with the mean over the queries; with `repair_scan`
    "index" only those that some query finds have a score. A whole token's score is the mean over
    layers and heads, spread to its neighbours as in the session's repairs.
    Rows that evictions protect stay; of the others the best tokens become active, or those rows
    that the session's method selects in each layer, as many as the budget has, the reserve for
    repairs included. Rows that a repair promoted become ordinary ones.

    Yields between pages and layers, so that other sessions decode. Nothing happens while all rows
    are active. source: of the rows, the engine's store unless given. Adds to `report`. Raises the
    errors of the store; then no row has moved.
    """
    session = resident.session
    reselection = resident.config.reselection
    if reselection is None or not due(reselection, output_tokens):
        return
    if engine.cache.holds_all(resident.slot, session.length):
        return
    started = time.perf_counter()
    source = source or engine.store
    yield from wait_for_writes(engine, session)
    with map_store_errors():
        tokens = min(reselection.every, output_tokens)
        scores = yield from _score_rows(engine, resident, source, tokens, reselection.whole_tokens)
        wanted = yield from _select_rows(engine, resident, scores, reselection.whole_tokens)
        moves = become(engine.cache, source, resident, wanted)
    engine.cache.clear_promoted(resident.slot)
    session.promoted_rows = 0
    record_evicted(session, _evicted_shares(moves, scores))
    seconds = time.perf_counter() - started
    report.count += 1
    report.rows_in += moves.rows_in
    report.rows_out += moves.rows_out
    report.seconds += seconds
    engine.metrics.inc("worker_reselected_rows_total", moves.rows_in)
    engine.metrics.observe("worker_reselection_seconds", seconds)
    yield None


def _score_rows(
    engine: Engine, resident: ResidentSession, source: StoredRows, tokens: int, whole_tokens: bool
) -> Steps[list[Tensor]]:
    """Score all rows by the last `tokens` queries: per layer float32 `[n_kv_heads, length]`.

    Of whole tokens all rows have the same score, the utility that a repair would give the token.
    """
    session = resident.session
    observed = session.queries.observed().last(tokens)
    pooling = resident.config.method.attention_pooling
    reduction = HeadReduction("mean", pooling.group, causal=True)
    result: ScanResult | None = None
    if resident.config.repair_scan == "index":
        result = yield from scan_index(engine, resident, observed, by_head=reduction, source=source)
    if result is None:
        result = yield from scan_by_head(
            source,
            session.name,
            observed,
            session.length,
            reduction=reduction,
            transfers=engine.cache.transfers,
        )
    scores = result.scores.to(engine.cache.device)
    if whole_tokens:
        by_token = scores.mean((0, 1))
        # Every query attends to the sinks: they must not bring their neighbours.
        by_token[: engine.settings.sinks] = 0
        return list(resident.config.repair.utility(by_token).expand_as(scores))
    positions = _all_positions(engine, session.length)
    first = session.length - observed.tokens
    return [smooth_before(layer, positions, first, pooling.width, pooling.kind) for layer in scores]


def _select_rows(
    engine: Engine, resident: ResidentSession, scores: list[Tensor], whole_tokens: bool
) -> Generator[None, None, list[Tensor]]:
    """Select each layer's rows among all: int64 positions `[n_kv_heads, m]`, -1 for none.

    Layers that share a selection get that of the first of them.
    """
    session = resident.session
    config = resident.config
    method = config.method
    # Of equal tokens a method that lets the heads compete would give the first head all.
    select = top_per_head if whole_tokens else method.select
    positions = _all_positions(engine, session.length)
    ranks = combine_scores(method, scores, [positions] * len(scores), session.episode.segments)
    wanted = list[Tensor]()
    for layer, ranked in enumerate(ranks):
        if layer % method.shares_layers:
            wanted.append(wanted[-1])
            continue
        stays = protected_rows(positions, session, engine.settings, layer, turn_over=False)
        rows = config.layer_rows[layer] + config.reserve
        # An index among all rows is the row's position.
        wanted.append(select(ranked.masked_fill(stays, torch.inf), positions, rows))
        yield None
    return wanted


def _all_positions(engine: Engine, length: int) -> Tensor:
    positions = torch.arange(length, dtype=torch.int32, device=engine.cache.device)
    return positions.expand(engine.cache.shape.n_kv_heads, -1)


def _evicted_shares(moves: RowMoves, scores: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The evicted rows' tokens, int64 `[k]` per layer, and their shares in the tokens' scores."""
    shares = []
    for positions, layer_scores in zip(moves.evicted, scores, strict=True):
        left = positions >= 0
        found = layer_scores.cpu().gather(1, positions.clamp(min=0))
        weight = 1 / (len(scores) * len(positions))
        shares.append((positions[left], found[left] * weight))
    return shares
