"""The switch of a session's active rows from one episode to another (EpiCache 3.1, stage 3)."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.store_io import map_store_errors
from workers.episodes.rows import EpisodeRows
from workers.episodes.selection import LayerSelector, select_with_newer
from workers.errors import BadEpisode
from workers.primitives.selection import is_among, mask_to_indices


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
        changes = _plan_changes(engine, resident, episode, rows, active)
        _apply_changes(engine, resident, changes, report)
        session.episode = convert.active_episode_from_wire(
            episode.id, episode.patched_prompt, episode.segments
        )
    else:
        report.rows_kept = sum(active.row_counts())
    report.bytes_moved = report.rows_moved * engine.model.shape.row_bytes(engine.model.dtype)
    report.seconds = time.perf_counter() - started
    return report


@dataclass(frozen=True)
class _LayerChange:
    """One layer's part of a switch, int64 `[n_kv_heads, m]` each, -1 as padding.

    `keep` are slot indices, `load` positions in the store; `kept` counts rows of both selections.
    """

    keep: Tensor
    load: Tensor
    kept: int


def _plan_changes(
    engine: Engine,
    resident: ResidentSession,
    episode: pb.Episode,
    rows: EpisodeRows,
    active: Selection,
) -> list[_LayerChange]:
    config = resident.config
    length = resident.session.length
    changes = []
    # The recent window stays active whatever its topic, as after an eviction.
    start = min(episode.length, length - engine.settings.recent)
    for layer, (positions, promoted) in enumerate(
        zip(active.positions, active.promoted, strict=True)
    ):
        selector = LayerSelector(config.method, config.layer_rows[layer], engine.settings.sinks)
        newer = torch.where((positions >= start) & ~promoted, positions, EMPTY).sort(dim=1).values
        older = torch.where(rows.positions[layer] < start, rows.positions[layer], EMPTY)
        selected = select_with_newer(older, rows.scores[layer].float(), newer, selector)
        wanted = selected.masked_fill(selected < 0, EMPTY)
        stays = is_among(positions, wanted)
        keep = mask_to_indices(stays | promoted)
        absent = mask_to_indices((wanted != EMPTY) & ~is_among(wanted, positions))
        load = torch.where(absent < 0, -1, wanted.gather(1, absent.clamp(min=0)))
        changes.append(_LayerChange(keep, load, int(stays.sum())))
    return changes


def _apply_changes(
    engine: Engine,
    resident: ResidentSession,
    changes: list[_LayerChange],
    report: pb.SwitchReport,
) -> None:
    """Read all rows first, so that a failed read leaves the session as it was, then move them."""
    with map_store_errors():
        loaded = engine.store.gather_selection(
            resident.session.name, [change.load for change in changes]
        )
    for layer, (change, (keys, values)) in enumerate(zip(changes, loaded, strict=True)):
        engine.cache.keep(resident.slot, layer, change.keep.to(engine.cache.device))
        positions = torch.where(change.load < 0, EMPTY, change.load).to(torch.int32)
        promoted = torch.zeros_like(positions, dtype=torch.bool)
        engine.cache.insert(resident.slot, layer, positions, keys, values, promoted)
        report.rows_moved += int((change.load >= 0).sum())
        report.rows_kept += change.kept
