"""Re-selection: while a session answers, the answer's queries select its rows anew among all stored.

LoopServe section 5.2, Algorithm 6. What was evicted while the prompt was read can return as soon as
the answer asks for it, and leaves again when it does not. Ours is the selection of a share of whole
tokens: a head that will need a row with the next token alone gets it from those that look for it
already.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvrecall.domain.settings.reselection import Reselection
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.activation import LayerSource, RowMoves, become
from workers.engine.engine import Engine
from workers.engine.eviction.evict import protected_rows, record_evicted
from workers.engine.eviction.ranking import combine_scores
from workers.engine.session import ResidentSession
from workers.engine.stored.store_io import map_store_errors
from workers.generation.host_copy import fill_host_copy
from workers.generation.steps import Steps
from workers.primitives.observation import Observed
from workers.primitives.scoring import smooth_before
from workers.primitives.selection import mask_to_indices, top_mask
from workers.repair.observe import observe_contrast
from workers.repair.scan.heads import scan_copy, scan_heads
from workers.repair.scan.keys import PageSource, StoredKeys
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import HeadReduction, Signal
from workers.retrieval.host_copy import HostCopy

# What the attention of one token counts relative to that of the next. The newest says best what the
# next token needs, and those before it what the statement is about.
_DECAY = 0.85
# Tokens of an answer after which its neutral signal is observed anew, behind its newest row.
_NEUTRAL_TOKENS = 128


class StoredRows(LayerSource, PageSource, Protocol):
    """A source of a session's rows and of its pages: `kvstore.store.RowStore`, or one like it."""


@dataclass(eq=False)
class TurnReselections:
    """The re-selections of a turn so far.

    Attributes:
        report: Their number, rows and seconds.
        neutral_attention: Of the neutral signal to the tokens before it, float32 `[tokens]`, on the
            CPU; None before the first re-selection.
    """

    report: pb.ReselectionReport = field(default_factory=pb.ReselectionReport)
    neutral_attention: Tensor | None = None


# Scans the session's rows by observed queries, of which each counts so much relative to the next.
_ScanRows = Callable[[Observed, float], Steps[ScanResult]]


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
    turn: TurnReselections,
    source: StoredRows | None = None,
) -> Steps[None]:
    """Make the rows active that the answer's last tokens attend to most, if that is due now.

    All stored rows are candidates, scored in every layer and KV head by the softmax of the newest
    queries, the prompt's last ones at first, over all rows: the largest of a query's weights, as in
    repairs. A whole token's score is the mean over layers and heads, less a neutral signal's and
    spread to its neighbours as in the session's repairs.
    Rows that evictions protect stay. Of the others each head selects by its own scores, and the
    `token_share` of them all heads by the tokens' scores; as many as the budget has, the reserve
    for repairs included. With `token_share` 0 the session's method selects in each layer. Rows
    that a repair promoted become ordinary ones.

    Rows are read from the session's copy of them in host memory, as retrieval does, and from pages
    where there is no memory for it.

    Yields between copies and layers, so that other sessions decode. Nothing happens while all rows
    are active. source: of the rows, the engine's store unless given. Adds to the `turn`'s report. Raises
    the errors of the store; then no row has moved.
    """
    session = resident.session
    reselection = resident.config.reselection
    if reselection is None or not due(reselection, output_tokens):
        return
    if engine.cache.holds_all(resident.slot, session.length):
        return
    started = time.perf_counter()
    source = source or engine.store
    config = resident.config
    copy = yield from fill_host_copy(engine, resident, source, index=config.retrieved > 0)
    with map_store_errors():
        share = reselection.token_share
        observed = session.queries.observed().last(reselection.window)
        scan = partial(_scan, engine, resident, source, copy)
        scores = yield from _score_rows(
            engine, resident, scan, observed, turn if share > 0 else None
        )
        wanted = yield from _select_rows(engine, resident, scores, share)
        moves = become(engine.cache, copy.rows if copy else source, resident, wanted)
    engine.cache.clear_promoted(resident.slot)
    session.promoted_rows = 0
    record_evicted(engine.group, session, _evicted_shares(moves, scores.by_layer(share)))
    seconds = time.perf_counter() - started
    turn.report.count += 1
    turn.report.rows_in += moves.rows_in
    turn.report.rows_out += moves.rows_out
    turn.report.seconds += seconds
    engine.metrics.inc("worker_reselected_rows_total", moves.rows_in)
    engine.metrics.observe("worker_reselection_seconds", seconds)
    yield None


@dataclass(frozen=True, eq=False)
class _Scores:
    """Scores of all stored rows.

    Attributes:
        heads: Per layer float32 `[n_kv_heads, length]`, pooled as the session's method does.
        tokens: float32 `[length]`, the utility that a repair would give the token.
    """

    heads: list[Tensor]
    tokens: Tensor

    def by_layer(self, token_share: float) -> list[Tensor]:
        """Per layer float32 `[n_kv_heads, length]`: the tokens' scores, where they are used."""
        if token_share == 0:
            return self.heads
        return [self.tokens.expand_as(layer) for layer in self.heads]


def _score_rows(
    engine: Engine,
    resident: ResidentSession,
    scan: _ScanRows,
    observed: Observed,
    turn: TurnReselections | None,
) -> Steps[_Scores]:
    """Score all rows by the observed queries; with a `turn`, whole tokens against its neutral signal."""
    session = resident.session
    device = engine.cache.device
    neutral = torch.zeros(0)
    if turn is not None:
        neutral = yield from _neutral_attention(engine, resident, scan, turn)
    result = yield from scan(observed, _DECAY)
    # All layers and heads have the same positions: as one layer with one head's.
    positions = _all_positions(engine, session.length)[:1]
    first = session.length - observed.tokens
    pooling = resident.config.method.attention_pooling
    by_head = result.scores.to(device)
    heads = smooth_before(by_head.flatten(0, 1), positions, first, pooling.width, pooling.kind)
    by_token = result.tokens.clone()
    by_token[: len(neutral)] -= resident.config.repair.contrast * neutral
    by_token.clamp_min_(0)
    # Every query attends to the sinks: they must not bring their neighbours.
    by_token[: engine.settings.sinks] = 0
    heads = heads.view_as(by_head)
    return _Scores(list(heads), resident.config.repair.utility(by_token.to(device)))


def _neutral_attention(
    engine: Engine, resident: ResidentSession, scan: _ScanRows, turn: TurnReselections
) -> Steps[Tensor]:
    """The neutral signal's attention to the tokens before it, float32 `[length]`; 0 without one.

    Once for some tokens of an answer: it costs a step of the model and a scan. It depends on the
    answer's length alone, so it is the same when the turn runs again.
    """
    session = resident.session
    known = turn.neutral_attention
    if known is not None and session.length <= len(known) + _NEUTRAL_TOKENS:
        return known
    contrast = yield from observe_contrast(engine, resident)
    attention = torch.zeros(session.length)
    if contrast is not None:
        attention = (yield from scan(contrast.neutral, 1.0)).tokens
    turn.neutral_attention = attention
    return attention


def _scan(
    engine: Engine,
    resident: ResidentSession,
    source: StoredRows,
    copy: HostCopy | None,
    observed: Observed,
    decay: float,
) -> Steps[ScanResult]:
    """Scan all stored rows for every layer and KV head: each row's largest weight of a query."""
    config = resident.config
    session = resident.session
    transfers = engine.cache.transfers
    signal = Signal(observed, engine.store.layout.n_kv_heads, transfers.device, group=engine.group)
    reduction = HeadReduction(
        "max", config.method.attention_pooling.group, causal=True, decay=decay
    )
    if copy is None:
        keys = StoredKeys(source, session.name, session.length, transfers)
        return (yield from scan_heads(keys, signal, reduction))
    return (yield from scan_copy(copy.rows, signal, reduction, transfers))


def _select_rows(
    engine: Engine, resident: ResidentSession, scores: _Scores, token_share: float
) -> Generator[None, None, list[Tensor]]:
    """Select each layer's rows among all: int64 positions `[n_kv_heads, m]`, -1 for none.

    Layers that share a selection get that of the first of them.
    """
    session = resident.session
    config = resident.config
    method = config.method
    positions = _all_positions(engine, session.length)
    own, tokens = (
        combine_scores(
            method, each, [positions] * len(each), session.episode.segments, engine.group
        )
        for each in (scores.heads, scores.by_layer(token_share))
    )
    wanted = list[Tensor]()
    for layer in range(len(own)):
        if layer % method.shares_layers:
            wanted.append(wanted[-1])
            continue
        stays = protected_rows(positions, session, engine.settings, layer, turn_over=False)
        rows = config.layer_rows[layer] + config.reserve
        # An index among all rows is the row's position.
        if token_share == 0:
            wanted.append(method.select(own[layer].masked_fill(stays, torch.inf), positions, rows))
        else:
            wanted.append(_select_mixed(own[layer], tokens[layer], stays, rows, token_share))
        yield None
    return wanted


def _select_mixed(
    own: Tensor, tokens: Tensor, stays: Tensor, rows: int, token_share: float
) -> Tensor:
    """Select each head's best rows by its own scores, then the best tokens for all heads.

    Scores float32 `[n_kv_heads, length]`; stays: bool, rows that are selected in any case, as many
    in each head. Heads do not compete: of equal tokens the first head would get all.
    """
    fixed = int(stays[0].sum())
    n_own = int((1 - token_share) * max(0, rows - fixed))
    best = top_mask(own.masked_fill(stays, torch.inf), fixed + n_own)
    return mask_to_indices(top_mask(tokens.masked_fill(best | stays, torch.inf), rows))


def _all_positions(engine: Engine, length: int) -> Tensor:
    positions = torch.arange(length, dtype=torch.int32, device=engine.cache.device)
    return positions.expand(engine.cache.shape.n_kv_heads, -1)


def _evicted_shares(moves: RowMoves, scores: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The evicted rows' tokens, int64 `[k]` per layer, and their shares in the tokens' scores, float64."""
    shares = []
    for positions, layer_scores in zip(moves.evicted, scores, strict=True):
        left = positions >= 0
        found = layer_scores.cpu().gather(1, positions.clamp(min=0))
        shares.append((positions[left], found[left].double() / (len(scores) * len(positions))))
    return shares
