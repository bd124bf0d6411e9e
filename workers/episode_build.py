"""Building episodes: every plan's patched prompt scores the session's rows, and the session's method chooses.

In one pass over the row store for all plans, or as EpiCache Algorithm 1 does it, by one prefill per plan. A build is a
job of the scheduler like a repair: it gives way between its steps, and leaves the session as it was.
"""

import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from kvrecall.v1 import worker_pb2 as wire
from workers.cache import EMPTY
from workers.decode import NextLogits
from workers.engine import Engine, storage
from workers.episode_scoring import EpisodeScoring, LayerChoice, choose_of_all, episode_scores
from workers.episodes import EpisodeRows
from workers.errors import BadEpisode, BadSettings
from workers.observation import Observed
from workers.prefill import prefill
from workers.scoring import attended, over_tokens_and_group
from workers.session import WorkerSession
from workers.stored_attention import StoredAttention, stored_keys
from workers.tokenizer import Segment
from workers.turn import Yielded, written

Steps = Generator[Yielded, NextLogits, list[wire.Episode]]


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


def _in_one_pass(engine: Engine, session: WorkerSession, request: wire.BuildEpisodesRequest) -> Steps:
    """All plans against the stored rows, which are read twice however many plans there are."""
    shape, scoring = engine.model.shape, EpisodeScoring.of(session.method)
    attentions = []
    for plan in request.plans:
        session.unsettled = True  # while the prompt's rows are among the session's
        attentions.append(StoredAttention(_observed(engine, session, plan), shape.n_kv_heads))
        session.unsettled = False
        yield None
    scores = torch.empty(len(attentions), shape.n_layers, shape.n_kv_heads, session.length)
    yield from _attended(engine, session, attentions, scoring, scores)
    episodes = []
    for plan, attended_rows in zip(request.plans, scores, strict=True):
        episodes.append(_chosen(engine, session, plan, attended_rows, scoring))
        yield None
    return episodes


def _attended(
    engine: Engine,
    session: WorkerSession,
    attentions: Sequence[StoredAttention],
    scoring: EpisodeScoring,
    scores: Tensor,
) -> Generator[None, None, None]:
    """Fill in what every row gets of each prompt's attention: float32 `[plans, n_layers, n_kv_heads, length]`."""
    stored = (engine.store, session.name, session.length, engine.model.device)
    with storage():
        for _, keys in stored_keys(*stored):
            for layer, rows in enumerate(keys):
                for attention in attentions:
                    attention.add(layer, rows)
            yield
        for start, keys in stored_keys(*stored):
            for layer, rows in enumerate(keys):
                for plan, attention in enumerate(attentions):
                    weights = attention.weights(layer, rows)
                    reduced = over_tokens_and_group(weights, tokens=scoring.reduce, group=scoring.reduce)
                    scores[plan, layer, :, start : start + rows.shape[1]] = reduced.cpu()
            yield


def _chosen(
    engine: Engine, session: WorkerSession, plan: wire.EpisodePlan, attended_rows: Tensor, scoring: EpisodeScoring
) -> wire.Episode:
    """An episode of the method's own selection among all rows; layers that share a selection share it here."""
    members = _members(plan, session.length)
    places, scores = list[Tensor](), list[Tensor]()
    for layer, attended_layer in enumerate(attended_rows):
        leader = layer - layer % session.method.shares_layers
        if layer == leader:
            ranked = episode_scores(attended_layer, members, scoring)
            chosen = choose_of_all(ranked, _choice(engine, session, layer, scoring))
        places.append(chosen)
        scores.append(ranked.gather(1, chosen.clamp(min=0)))
    return _episode(plan, EpisodeRows.chosen(places, scores), session.length)


def _by_prefill(engine: Engine, session: WorkerSession, request: wire.BuildEpisodesRequest) -> Steps:
    """EpiCache Algorithm 1, A3: the whole conversation anew per plan, in a session that nobody else knows.

    It takes the session's slot meanwhile, so that a worker needs none beside it.
    """
    engine.unseat(session)
    episodes = []
    for plan in request.plans:
        scratch = session.scratch(plan.patched_prompt)
        scratch.turn_start = len(request.token_ids)  # all of it was said before: no row is kept for being recent talk
        engine.seat(scratch)
        try:
            said = [Segment(tuple(request.token_ids), recorded=False)]
            yield from prefill(engine, scratch, said, keep_distribution=False, prompt_said=_nothing)
            episodes.append(_left(engine, scratch, plan))
        finally:
            engine.abandon(scratch)
    return episodes


def _left(engine: Engine, scratch: WorkerSession, plan: wire.EpisodePlan) -> wire.Episode:
    """What the prefill's last eviction left, scored by the patched prompt among itself."""
    assert scratch.slot is not None, "seated for its prefill"
    scoring = EpisodeScoring.of(scratch.method)
    observed = _observed(engine, scratch, plan)
    places, scores = list[Tensor](), list[Tensor]()
    for layer, queries in enumerate(observed.queries):
        keys, _, positions = engine.cache.rows_of(scratch.slot, layer)
        by = scoring.reduce
        scores.append(attended(queries, keys, positions, observed.positions, tokens=by, group=by).cpu())
        places.append(torch.where(positions == EMPTY, -1, positions).long().cpu())
    return _episode(plan, EpisodeRows.chosen(places, scores), scratch.length)


def _observed(engine: Engine, session: WorkerSession, plan: wire.EpisodePlan) -> Observed:
    """The queries of a plan's prompt after the method's instruction; a long one in pieces that each follow it."""
    instruction = engine.tokenizer.encode(session.method.observation.prompt)[: engine.settings.block_tokens // 2]
    room = engine.settings.block_tokens - len(instruction)
    prompt = plan.patched_prompt
    pieces = ([*instruction, *prompt[start : start + room]] for start in range(0, len(prompt), room))
    return Observed.joined([engine.observe(session, piece) for piece in pieces])


def _members(plan: wire.EpisodePlan, length: int) -> Tensor:
    """The tokens of the episode's own segments: bool `[length]`."""
    members = torch.zeros(length, dtype=torch.bool)
    for span in plan.members:
        members[span.start : span.stop] = True
    return members


def _choice(engine: Engine, session: WorkerSession, layer: int, scoring: EpisodeScoring) -> LayerChoice:
    return LayerChoice(
        method=session.method,
        layer=layer,
        rows=session.layer_rows[layer],
        end=session.length,
        sinks=engine.settings.sinks if scoring.sinks else 0,
        recent=engine.settings.recent if scoring.recent else 0,
        seed=session.seed + session.length,
    )


def _episode(plan: wire.EpisodePlan, rows: EpisodeRows, length: int) -> wire.Episode:
    return wire.Episode(id=plan.id, rows=rows.to_bytes(), patched_prompt=plan.patched_prompt, length=length)


def _require_buildable(session: WorkerSession, request: wire.BuildEpisodesRequest) -> None:
    if not session.method.evicts:
        raise BadSettings(f"method {session.method.name} keeps every row: there is no episode to build")
    if len(request.token_ids) > session.length:
        raise BadEpisode(f"{len(request.token_ids)} tokens are to be prefilled, session {session.name} has said "
                         f"{session.length}")  # fmt: skip
    for plan in request.plans:
        if not plan.patched_prompt:
            raise BadEpisode(f"episode {plan.id} has no patched prompt to score with")
        if any(span.start > span.stop or span.stop > session.length for span in plan.members):
            raise BadEpisode(f"episode {plan.id} has members beyond the {session.length} rows of {session.name}")


def _nothing() -> None:
    """Nobody waits for the end of a build's prompt."""
