"""Builds episodes: the session's method ranks all of its rows for each plan, and selects.

In one pass over the row store for all plans, or by one prefill per plan (EpiCache Algorithm 1). A
build is a job of the scheduler: it yields between its steps and leaves the session as it was.
"""

import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from kvrecall.domain.episodes import ActiveEpisode, EpisodeSegment
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine
from workers.engine.eviction.evict import active_rows
from workers.engine.eviction.ranking import combine_scores, rank_rows
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.store_io import map_store_errors
from workers.episodes.rows import EpisodeRows
from workers.episodes.selection import LayerSelector, select_from_all, select_indices
from workers.errors import BadEpisode, BadSettings
from workers.generation.prefill import prefill
from workers.generation.steps import Steps, wait_for_writes
from workers.methods import LayerRows
from workers.model.tokenizer import Segment
from workers.primitives.observation import Observed
from workers.repair.key_chunks import read_key_chunks

_KEY_BYTES = 1 << 28  # of stored keys in memory at a time
_SHORTLIST = 4  # rows of the shortlist, in budgets
_KEPT_SHARE = 0.8  # of the shortlist, in each narrowing step
_NO_QUERIES = Observed((), torch.empty(0, dtype=torch.int32))


def run_build(
    engine: Engine, resident: ResidentSession, request: pb.BuildEpisodesRequest
) -> Steps[pb.BuildEpisodesResult]:
    """Select the rows of every plan's episode.

    Raises BadSettings and BadEpisode before anything is computed.
    """
    started = time.perf_counter()
    session = resident.session
    session.require_committed()
    _require_buildable(session, request)
    yield from wait_for_writes(engine, session)
    build = _build_by_prefill if request.token_ids else _build_in_one_pass
    episodes = yield from build(engine, resident, request)
    return pb.BuildEpisodesResult(
        episodes=episodes,
        scored_rows=len(request.token_ids) or session.length,
        seconds=time.perf_counter() - started,
    )


# One pass over the stored rows


def _build_in_one_pass(
    engine: Engine, resident: ResidentSession, request: pb.BuildEpisodesRequest
) -> Steps[list[pb.Episode]]:
    """Score all plans against the stored rows: per plan, an eviction among all rows."""
    session = resident.session
    method = session.config.method
    observations = yield from _observe_plans(engine, resident, request)
    scores = yield from _score_stored(engine, session, observations)
    positions = [_all_positions(engine, session.length)] * engine.model.shape.n_layers
    episodes = []
    for index, plan in enumerate(request.plans):
        segments = convert.segments_from_wire(plan.segments)
        plan_scores = scores[index % len(observations)]
        ranks = combine_scores(method, plan_scores, positions, segments)
        if method.compares_rows:
            episodes.append((yield from _narrow(engine, session, plan, ranks, segments)))
        else:
            episodes.append(_select_episode(engine, session, plan, ranks))
        yield None
    return episodes


def _observe_plans(
    engine: Engine, resident: ResidentSession, request: pb.BuildEpisodesRequest
) -> Steps[list[Observed]]:
    """Observe each plan's prompt; one empty observation for methods without an episode prompt."""
    session = resident.session
    if not session.config.method.observation.episode:
        return [_NO_QUERIES]
    observations = []
    for plan in request.plans:
        session.dirty = True  # while the prompt's rows are among the session's
        observations.append(_observe_plan(engine, resident, plan))
        session.dirty = False
        yield None
    return observations


def _score_stored(
    engine: Engine, session: WorkerSession, observations: Sequence[Observed]
) -> Generator[None, None, list[list[Tensor]]]:
    """Score all rows, per observation: float32 `[n_kv_heads, length]` per layer.

    The store is read once for as many layers as `_KEY_BYTES` hold: all of them, unless the session
    is very long.
    """
    shape = engine.model.shape
    method = session.config.method
    n = session.length
    layer_bytes = max(1, n * shape.n_kv_heads * shape.head_dim * engine.model.dtype.itemsize)
    layers_at_once = max(1, _KEY_BYTES // layer_bytes)
    scores: list[list[Tensor]] = [[] for _ in observations]
    positions = _all_positions(engine, n)
    for first in range(0, shape.n_layers, layers_at_once):
        layers = slice(first, first + layers_at_once)
        pages = list[Tensor]()
        with map_store_errors():
            for _, keys in read_key_chunks(engine.store, session.name, n, engine.model.device):
                pages.append(keys if layers_at_once >= shape.n_layers else keys[layers].clone())
                yield
        for layer, keys in enumerate(torch.cat(pages, dim=2), first):
            for layer_scores, observed in zip(scores, observations, strict=True):
                rows = _stored_rows(engine, session, layer, keys, positions, observed)
                layer_scores.append(method.scores(rows))
            yield
    return scores


def _stored_rows(
    engine: Engine,
    session: WorkerSession,
    layer: int,
    keys: Tensor,
    positions: Tensor,
    observed: Observed,
) -> LayerRows:
    """Stored rows of a layer in the form that methods score; values are not read."""
    no_queries = keys.new_zeros(engine.model.shape.n_heads, 0, keys.shape[2])
    return LayerRows(
        layer=layer,
        keys=keys,
        values=keys[..., :0],
        positions=positions,
        queries=observed.queries[layer] if observed.queries else no_queries,
        query_positions=observed.positions.to(keys.device),
        accumulated=torch.zeros_like(positions, dtype=torch.float32),
        end=session.length,
        seed=session.config.seed + session.length,
    )


def _all_positions(engine: Engine, length: int) -> Tensor:
    positions = torch.arange(length, dtype=torch.int32, device=engine.model.device)
    return positions.expand(engine.model.shape.n_kv_heads, -1)


def _select_episode(
    engine: Engine, session: WorkerSession, plan: pb.EpisodePlan, ranks: Sequence[Tensor]
) -> pb.Episode:
    """Build an episode of the method's own selection among all rows."""
    config = session.config
    positions = list[Tensor]()
    scores = list[Tensor]()
    for layer, layer_ranks in enumerate(ranks):
        selector = LayerSelector(config.method, config.layer_rows[layer], engine.settings.sinks)
        selected = select_from_all(layer_ranks, selector)
        positions.append(selected.cpu())
        scores.append(layer_ranks.gather(1, selected.clamp(min=0)).cpu())
    return _to_episode(plan, EpisodeRows.from_selection(positions, scores), session.length)


def _narrow(
    engine: Engine,
    session: WorkerSession,
    plan: pb.EpisodePlan,
    ranks: Sequence[Tensor],
    segments: Sequence[EpisodeSegment],
) -> Steps[pb.Episode]:
    """Build an episode stepwise: drop a fifth of a shortlist and rank the rest, down to the budget.

    For methods that compare rows. A prefill in blocks does the same: each of its evictions compares
    only rows that are still active.
    """
    config = session.config
    sinks = engine.settings.sinks
    layers = range(len(ranks))
    wide = [LayerSelector(config.method, _SHORTLIST * rows, sinks) for rows in config.layer_rows]
    positions = [select_from_all(ranks[layer], wide[layer]).cpu() for layer in layers]
    with map_store_errors():
        gathered = engine.store.gather_selection(session.name, positions)
    keys = [layer_keys for layer_keys, _ in gathered]
    while True:
        rows = [
            _shortlist_rows(engine, session, *layer)
            for layer in zip(layers, positions, keys, strict=True)
        ]
        scores = rank_rows(config.method, rows, segments)
        counts = [
            max(config.layer_rows[layer], int(positions[layer].shape[1] * _KEPT_SHARE))
            for layer in layers
        ]
        selectors = [LayerSelector(config.method, count, sinks) for count in counts]
        indices = [select_indices(scores[i], rows[i].positions, selectors[i]).cpu() for i in layers]
        positions = _gather_layers(positions, indices)
        keys = _gather_layers(keys, indices)
        kept_scores = _gather_layers([score.cpu() for score in scores], indices)
        yield None
        if counts == list(config.layer_rows):
            episode_rows = EpisodeRows.from_selection(positions, kept_scores)
            return _to_episode(plan, episode_rows, session.length)


def _shortlist_rows(
    engine: Engine, session: WorkerSession, layer: int, positions: Tensor, keys: Tensor
) -> LayerRows:
    """Rows at int64 positions `[n_kv_heads, m]`, -1 as padding, in the form that methods score."""
    device = engine.model.device
    row_positions = torch.where(positions < 0, EMPTY, positions).to(device, torch.int32)
    return _stored_rows(engine, session, layer, keys.to(device), row_positions, _NO_QUERIES)


def _gather_layers(values: Sequence[Tensor], indices: Sequence[Tensor]) -> list[Tensor]:
    """Gather along the rows of each layer's `[n_kv_heads, m]` or `[n_kv_heads, m, head_dim]`.

    Two-dimensional values become -1 where the index is negative.
    """
    gathered = []
    for value, index in zip(values, indices, strict=True):
        clamped = index.clamp(min=0)
        if value.dim() == 3:
            gathered.append(value.gather(1, clamped[..., None].expand(-1, -1, value.shape[2])))
        else:
            gathered.append(value.gather(1, clamped).masked_fill(index < 0, -1))
    return gathered


# One prefill per plan


def _build_by_prefill(
    engine: Engine, resident: ResidentSession, request: pb.BuildEpisodesRequest
) -> Steps[list[pb.Episode]]:
    """Prefill the conversation once per plan, in a scratch session (EpiCache Algorithm 1, A.3).

    The scratch session takes the session's slot, so that a worker needs none beside it.
    """
    session = resident.session
    engine.swap_out(session)
    episodes = []
    segments = [Segment(tuple(request.token_ids), recorded=False)]
    for plan in request.plans:
        scratch = session.create_scratch(_to_active_episode(plan))
        # No row is protected as part of the current turn.
        scratch.turn_start = len(request.token_ids)
        scratch_resident = engine.swap_in(scratch)
        try:
            yield from prefill(
                engine,
                scratch_resident,
                segments,
                keep_distribution=False,
                on_prompt_end=lambda: None,
            )
            episodes.append(_rank_active(engine, scratch_resident, plan))
        finally:
            engine.discard(scratch)
    return episodes


def _rank_active(engine: Engine, scratch: ResidentSession, plan: pb.EpisodePlan) -> pb.Episode:
    """Build an episode of the rows that are active after the prefill, ranked once more."""
    method = scratch.config.method
    observed = _NO_QUERIES
    if method.observation.episode:
        observed = _observe_plan(engine, scratch, plan)
    layers = [
        active_rows(engine.cache, scratch, observed, layer)
        for layer in range(engine.model.shape.n_layers)
    ]
    segments = scratch.session.episode.segments
    scores = [score.cpu() for score in rank_rows(method, layers, segments)]
    positions = [
        torch.where(rows.positions == EMPTY, -1, rows.positions).long().cpu() for rows in layers
    ]
    rows = EpisodeRows.from_selection(positions, scores)
    return _to_episode(plan, rows, scratch.session.length)


# Both


def _observe_plan(engine: Engine, resident: ResidentSession, plan: pb.EpisodePlan) -> Observed:
    """Observe a plan's prompt, as evictions in its episode do."""
    observed = engine.observe_patched(resident, plan.patched_prompt)
    assert observed is not None, "only methods that observe an episode's prompt get here"
    return observed


def _to_episode(plan: pb.EpisodePlan, rows: EpisodeRows, length: int) -> pb.Episode:
    return pb.Episode(
        id=plan.id,
        rows=rows.to_bytes(),
        patched_prompt=plan.patched_prompt,
        length=length,
        segments=plan.segments,
    )


def _to_active_episode(plan: pb.EpisodePlan) -> ActiveEpisode:
    return convert.active_episode_from_wire("", plan.patched_prompt, plan.segments)


def _require_buildable(session: WorkerSession, request: pb.BuildEpisodesRequest) -> None:
    """Raises BadSettings for a method without episodes, BadEpisode for a plan that does not fit."""
    method = session.config.method
    if not method.has_episodes:
        raise BadSettings(
            f"method {method.name} has no episodes: only one selection for all topics"
        )
    if len(request.token_ids) > session.length:
        raise BadEpisode(
            f"{len(request.token_ids)} tokens are to be prefilled, session {session.name} has "
            f"{session.length}"
        )
    for plan in request.plans:
        if not plan.patched_prompt:
            raise BadEpisode(f"episode {plan.id} has no patched prompt to score with")
        if any(span.start > span.stop or span.stop > session.length for span in plan.segments):
            raise BadEpisode(
                f"episode {plan.id} has segments beyond the {session.length} rows of {session.name}"
            )
