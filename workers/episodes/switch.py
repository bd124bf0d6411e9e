"""The switch of a session's active rows from one episode to another (EpiCache 3.1, stage 3)."""

import time

import torch
from torch import Tensor

from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.activation import become
from workers.engine.engine import Engine
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.store_io import map_store_errors
from workers.episodes.rows import EpisodeRows
from workers.episodes.selection import LayerSelector, select_with_newer
from workers.errors import BadEpisode
from workers.primitives.selection import is_among


def read_episode(engine: Engine, session: WorkerSession, episode: pb.Episode) -> EpisodeRows:
    """Parse an episode's rows for `switch`. Raises BadEpisode if they do not fit the session."""
    rows = EpisodeRows.from_bytes(episode.rows)
    shape = engine.model.shape
    length = episode.length
    if length > session.length:
        raise BadEpisode(
            f"episode {episode.id} was built from {length} rows, session {session.name} has "
            f"{session.length}; build it again"
        )
    heads = [shape.n_kv_heads] * shape.n_layers
    if [p.shape[0] for p in rows.positions] != heads or [s.shape for s in rows.scores] != [
        p.shape for p in rows.positions
    ]:
        raise BadEpisode(
            f"episode {episode.id} is not one of a model with {shape.n_layers} layers of "
            f"{shape.n_kv_heads} KV heads; build it again"
        )
    for positions, budget in zip(rows.positions, session.config.layer_rows, strict=True):
        if not _are_valid(positions, length, budget * shape.n_kv_heads):
            raise BadEpisode(
                f"episode {episode.id} does not list rows 0..{length - 1}, each once and in order, "
                f"within the {budget} rows per head of a layer's budget; build it again"
            )
    return rows


def _are_valid(positions: Tensor, length: int, most: int) -> bool:
    ascending = (positions[:, 1:] > positions[:, :-1]) | (positions[:, 1:] == EMPTY)
    inside = (positions >= 0) & ((positions < length) | (positions == EMPTY))
    return bool(ascending.all() and inside.all()) and int((positions != EMPTY).sum()) <= most


def switch(
    engine: Engine, resident: ResidentSession, episode: pb.Episode, rows: EpisodeRows
) -> pb.SwitchReport:
    """Make an episode's rows active; only rows that are not active yet are read from the store.

    Rows newer than the episode, and the recent window, stay active, the newest first, in at most
    half of a layer's rows; they replace the episode's rows of lowest score. Promoted rows stay in
    their reserve. A switch to the active episode moves nothing. Every row must be in the store.
    Raises RowsMissing or StorageFailed; then nothing has changed.
    """
    started = time.perf_counter()
    session = resident.session
    report = pb.SwitchReport(episode=episode.id)
    active = Selection.from_slot(engine.cache, resident.slot)
    if episode.id != session.episode.id:
        wanted = _select_rows(engine, resident, episode, rows, active)
        with map_store_errors():
            moves = become(engine.cache, engine.store, resident, wanted)
        report.rows_moved = moves.rows_in
        report.rows_kept = moves.rows_kept
        session.episode = convert.active_episode_from_wire(
            episode.id, episode.patched_prompt, episode.segments
        )
    else:
        report.rows_kept = sum(active.row_counts())
    report.bytes_moved = report.rows_moved * engine.model.shape.row_bytes(engine.model.dtype)
    report.seconds = time.perf_counter() - started
    return report


def _select_rows(
    engine: Engine,
    resident: ResidentSession,
    episode: pb.Episode,
    rows: EpisodeRows,
    active: Selection,
) -> list[Tensor]:
    """Select each layer's rows, int64 positions `[n_kv_heads, m]`, -1 for none at a head's end."""
    config = resident.config
    length = resident.session.length
    wanted = []
    # The recent window stays active whatever its topic, as after an eviction.
    start = min(episode.length, length - engine.settings.recent)
    for layer, (positions, promoted) in enumerate(
        zip(active.positions, active.promoted, strict=True)
    ):
        selector = LayerSelector(config.method, config.layer_rows[layer], engine.settings.sinks)
        newer = torch.where((positions >= start) & ~promoted, positions, EMPTY).sort(dim=1).values
        older = rows.positions[layer].masked_fill(is_among(rows.positions[layer], newer), EMPTY)
        selected = select_with_newer(older, rows.scores[layer].float(), newer, selector)
        selected = selected.masked_fill(selected < 0, EMPTY)
        in_reserve = promoted & ~is_among(positions, selected)
        union = torch.cat([selected, positions.long().masked_fill(~in_reserve, EMPTY)], dim=1)
        union = union.sort(dim=1).values
        wanted.append(union.masked_fill(union == EMPTY, -1))
    return wanted
