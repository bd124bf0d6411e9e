"""Building episodes: the session's method ranks all of its rows as each plan's episode wants them, and chooses.

In one pass over the row store for all plans, or as EpiCache Algorithm 1 does it, by one prefill per plan. A build is a
job of the scheduler like a repair: it gives way between its steps, and leaves the session as it was.
"""

import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine
from workers.engine.eviction import active_rows
from workers.engine.ranking import combined, ranked
from workers.engine.session import WorkerSession, nearness
from workers.engine.store_io import storage
from workers.episodes.selection import LayerChoice, choose_of_all, choose_places
from workers.episodes.switch import EpisodeRows
from workers.errors import BadEpisode, BadSettings
from workers.generation import convert as wire_values
from workers.generation.decode import NextLogits
from workers.generation.prefill import prefill
from workers.generation.steps import Yielded, written
from workers.methods import LayerRows
from workers.model.tokenizer import Segment
from workers.primitives.observation import Observed
from workers.repair.key_chunks import stored_keys

_KEY_BYTES = 1 << 28
"""Stored keys that a build holds at a time."""
_SHORTLIST = 4
_STAYS = 0.8
"""Rows, in budgets, among which they are ranked again; the part of them that stays each time."""
_NOTHING = Observed((), torch.empty(0, dtype=torch.int32))

Steps = Generator[Yielded, NextLogits, list[wire.Episode]]
Narrowing = Generator[Yielded, NextLogits, wire.Episode]


def run_build(
    engine: Engine, session: WorkerSession, request: wire.BuildEpisodesRequest
) -> Generator[Yielded, NextLogits, wire.BuildEpisodesResult]:
    """Choose the rows of every plan's episode. Raises BadSettings and BadEpisode before anything was computed."""
    started = time.perf_counter()
    _require_buildable(session, request)
    yield from written(engine, session)
    build = _by_prefill if request.token_ids else _in_one_pass
    episodes = yield from build(engine, session, request)
    return wire.BuildEpisodesResult(
        episodes=episodes,
        scored_rows=len(request.token_ids) or session.length,
        seconds=time.perf_counter() - started,
    )


def _in_one_pass(
    engine: Engine, session: WorkerSession, request: wire.BuildEpisodesRequest
) -> Steps:
    """All plans against the stored rows: the eviction that would choose among everything, once per plan."""
    observations = [_NOTHING]
    if session.method.observation.episode:
        observations = []
        for plan in request.plans:
            session.unsettled = True  # while the prompt's rows are among the session's
            observations.append(_observed(engine, session, plan))
            session.unsettled = False
            yield None
    scores = yield from _scored(engine, session, observations)
    positions = [_all_positions(engine, session.length)] * engine.model.shape.n_layers
    episodes = []
    for index, plan in enumerate(request.plans):
        near = nearness(wire_values.to_near(plan.segments))
        ranks = combined(
            session.method, scores[index % len(observations)], positions, session.length, near
        )
        if session.method.compares_rows:
            episodes.append((yield from _narrowed(engine, session, plan, ranks, near)))
        else:
            episodes.append(_chosen(engine, session, plan, ranks))
        yield None
    return episodes


def _scored(
    engine: Engine, session: WorkerSession, observations: Sequence[Observed]
) -> Generator[None, None, list[list[Tensor]]]:
    """The method's own scores of all rows, for each observation: float32 `[n_kv_heads, length]` per layer.

    The store is read for as many layers at once as `_KEY_BYTES` hold: all of them, unless the session is very long.
    """
    shape = engine.model.shape
    n = session.length
    layer_bytes = max(1, n * shape.n_kv_heads * shape.head_dim * engine.model.dtype.itemsize)
    at_once = max(1, _KEY_BYTES // layer_bytes)
    scores: list[list[Tensor]] = [[] for _ in observations]
    positions = _all_positions(engine, n)
    for first in range(0, shape.n_layers, at_once):
        layers = slice(first, first + at_once)
        pages = list[Tensor]()
        with storage():
            for _, keys in stored_keys(engine.store, session.name, n, engine.model.device):
                pages.append(keys if at_once >= shape.n_layers else keys[layers].clone())
                yield
        for layer, keys in enumerate(torch.cat(pages, dim=2), first):
            for found, observed in zip(scores, observations, strict=True):
                found.append(
                    session.method.scores(
                        _stored_rows(engine, session, layer, keys, positions, observed)
                    )
                )
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
    """Stored rows of a layer as an eviction would see them; values are not read."""
    none = keys.new_zeros(engine.model.shape.n_heads, 0, keys.shape[2])
    return LayerRows(
        layer=layer,
        keys=keys,
        values=keys[..., :0],
        positions=positions,
        queries=observed.queries[layer] if observed.queries else none,
        query_positions=observed.positions.to(keys.device),
        accumulated=torch.zeros_like(positions, dtype=torch.float32),
        end=session.length,
        seed=session.seed + session.length,
    )


def _all_positions(engine: Engine, length: int) -> Tensor:
    positions = torch.arange(length, dtype=torch.int32, device=engine.model.device)
    return positions.expand(engine.model.shape.n_kv_heads, -1)


def _chosen(
    engine: Engine, session: WorkerSession, plan: wire.EpisodePlan, ranks: Sequence[Tensor]
) -> wire.Episode:
    """An episode of the method's own selection among all rows."""
    places = list[Tensor]()
    scores = list[Tensor]()
    for layer, ranked_rows in enumerate(ranks):
        choice = LayerChoice(session.method, session.layer_rows[layer], engine.settings.sinks)
        chosen = choose_of_all(ranked_rows, choice)
        places.append(chosen.cpu())
        scores.append(ranked_rows.gather(1, chosen.clamp(min=0)).cpu())
    return _episode(plan, EpisodeRows.chosen(places, scores), session.length)


def _by_prefill(
    engine: Engine, session: WorkerSession, request: wire.BuildEpisodesRequest
) -> Steps:
    """EpiCache Algorithm 1, A3: the whole conversation anew per plan, in a session that nobody else knows.

    It takes the session's slot meanwhile, so that a worker needs none beside it.
    """
    engine.unseat(session)
    episodes = []
    for plan in request.plans:
        scratch = session.scratch(plan.patched_prompt, wire_values.to_near(plan.segments))
        scratch.turn_start = len(
            request.token_ids
        )  # all of it was said before: no row is kept for being recent talk
        engine.seat(scratch)
        try:
            said = [Segment(tuple(request.token_ids), recorded=False)]
            yield from prefill(engine, scratch, said, keep_distribution=False, prompt_said=_nothing)
            episodes.append(_left(engine, scratch, plan))
        finally:
            engine.abandon(scratch)
    return episodes


def _left(engine: Engine, scratch: WorkerSession, plan: wire.EpisodePlan) -> wire.Episode:
    """What the prefill's last eviction left, ranked once more among itself."""
    assert scratch.slot is not None, "seated for its prefill"
    observed = _observed(engine, scratch, plan) if scratch.method.observation.episode else _NOTHING
    layers = [
        active_rows(engine.cache, scratch, observed, layer)
        for layer in range(engine.model.shape.n_layers)
    ]
    scores = [score.cpu() for score in ranked(scratch.method, layers, nearness(scratch.segments))]
    places = [
        torch.where(rows.positions == EMPTY, -1, rows.positions).long().cpu() for rows in layers
    ]
    return _episode(plan, EpisodeRows.chosen(places, scores), scratch.length)


def _observed(engine: Engine, session: WorkerSession, plan: wire.EpisodePlan) -> Observed:
    """The queries of a plan's prompt after the method's instruction; a long one in pieces that each follow it."""
    instruction = engine.tokenizer.encode(session.method.observation.prompt)[
        : engine.settings.block_tokens // 2
    ]
    room = engine.settings.block_tokens - len(instruction)
    prompt = plan.patched_prompt
    pieces = (
        [*instruction, *prompt[start : start + room]] for start in range(0, len(prompt), room)
    )
    return Observed.concatenate([engine.observe(session, piece) for piece in pieces])


def _narrowed(
    engine: Engine,
    session: WorkerSession,
    plan: wire.EpisodePlan,
    ranks: Sequence[Tensor],
    near: Tensor,
) -> Narrowing:
    """An episode by steps: of a shortlist a fifth leaves, the rest is ranked among itself, until the budget is met.

    A prefill in blocks does the same by its nature: each eviction compares rows with those that are still there.
    """
    layers = range(len(ranks))
    method = session.method
    sinks = engine.settings.sinks
    wide = [LayerChoice(method, _SHORTLIST * rows, sinks) for rows in session.layer_rows]
    held = [choose_of_all(ranks[layer], wide[layer]).cpu() for layer in layers]
    with storage():
        keys = [found for found, _ in engine.store.gather_selection(session.name, held)]
    while True:
        rows = [
            _some_rows(engine, session, *layer) for layer in zip(layers, held, keys, strict=True)
        ]
        scores = ranked(method, rows, near)
        wanted = [
            max(session.layer_rows[layer], int(held[layer].shape[1] * _STAYS)) for layer in layers
        ]
        choices = [LayerChoice(method, count, sinks) for count in wanted]
        places = [choose_places(scores[i], rows[i].positions, choices[i]).cpu() for i in layers]
        held = _taken(held, places)
        keys = _taken(keys, places)
        kept = _taken([s.cpu() for s in scores], places)
        yield None
        if wanted == list(session.layer_rows):
            return _episode(plan, EpisodeRows.chosen(held, kept), session.length)


def _some_rows(
    engine: Engine, session: WorkerSession, layer: int, positions: Tensor, keys: Tensor
) -> LayerRows:
    """Some rows of what the session said, int64 positions `[n_kv_heads, m]`, -1 for none, with their keys."""
    device = engine.model.device
    held = torch.where(positions < 0, EMPTY, positions).to(device, torch.int32)
    return _stored_rows(engine, session, layer, keys.to(device), held, _NOTHING)


def _taken(values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
    """Of each layer's `[n_kv_heads, m]` or `[n_kv_heads, m, head_dim]` what stands at its places, -1 where none is."""
    found = []
    for value, of_layer in zip(values, places, strict=True):
        index = of_layer.clamp(min=0)
        if value.dim() == 3:
            found.append(value.gather(1, index[..., None].expand(-1, -1, value.shape[2])))
        else:
            found.append(value.gather(1, index).masked_fill(of_layer < 0, -1))
    return found


def _episode(plan: wire.EpisodePlan, rows: EpisodeRows, length: int) -> wire.Episode:
    return wire.Episode(
        id=plan.id,
        rows=rows.to_bytes(),
        patched_prompt=plan.patched_prompt,
        length=length,
        segments=plan.segments,
    )


def _require_buildable(session: WorkerSession, request: wire.BuildEpisodesRequest) -> None:
    if not session.method.has_episodes:
        raise BadSettings(
            f"method {session.method.name} has no episodes: only one selection for all topics"
        )
    if len(request.token_ids) > session.length:
        raise BadEpisode(
            f"{len(request.token_ids)} tokens are to be prefilled, session {session.name} has said "
            f"{session.length}"
        )
    for plan in request.plans:
        if not plan.patched_prompt:
            raise BadEpisode(f"episode {plan.id} has no patched prompt to score with")
        if any(span.start > span.stop or span.stop > session.length for span in plan.segments):
            raise BadEpisode(
                f"episode {plan.id} has segments beyond the {session.length} rows of {session.name}"
            )


def _nothing() -> None:
    """Nobody waits for the end of a build's prompt."""
