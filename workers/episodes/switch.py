"""Episodes as lists of rows: their form on the wire, and the switch from one to another (EpiCache 3.1, stage 3)."""

import time
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine
from workers.engine.session import Selection, WorkerSession
from workers.engine.store_io import storage
from workers.episodes.selection import LayerChoice, choose_with_newer
from workers.errors import BadEpisode
from workers.generation import convert as wire_values
from workers.primitives.selection import mask_to_indices, position_mask


@dataclass(frozen=True)
class EpisodeRows:
    """Which rows an episode is: per layer positions int32 `[n_kv_heads, m]`, ascending, `EMPTY` at a head's end.

    scores: float16, the same shapes, 1 for the layer's highest: in their order, the lowest first, rows give way to
    newer ones.
    """

    positions: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]

    @classmethod
    def chosen(cls, places: list[Tensor], scores: list[Tensor]) -> "EpisodeRows":
        """From int64 positions `[n_kv_heads, m]`, -1 for none, and each row's score, float32 of the same shape."""
        return cls(
            tuple(torch.where(p < 0, EMPTY, p).to(torch.int32) for p in places),
            tuple(_scaled(s.masked_fill(p < 0, 0.0)) for p, s in zip(places, scores, strict=True)),
        )

    def to_bytes(self) -> bytes:
        """As safetensors: 6 bytes a row."""
        tensors = {
            f"positions.{layer}": rows.contiguous() for layer, rows in enumerate(self.positions)
        }
        tensors |= {
            f"scores.{layer}": scores.contiguous() for layer, scores in enumerate(self.scores)
        }
        return save(tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> "EpisodeRows":
        """Back from `to_bytes`. Raises BadEpisode for bytes that are no episode's."""
        try:
            tensors = load(data)
            layers = range(len(tensors) // 2)
            return cls(
                tuple(tensors[f"positions.{layer}"] for layer in layers),
                tuple(tensors[f"scores.{layer}"] for layer in layers),
            )
        except (SafetensorError, KeyError) as error:
            raise BadEpisode(
                f"an episode's rows cannot be read: {error}; build it again"
            ) from error

    def rows(self) -> int:
        """How many rows, over all layers and heads."""
        return sum(int((p != EMPTY).sum()) for p in self.positions)


def _scaled(scores: Tensor) -> Tensor:
    """To float16, with 1 for the largest: attention in a long conversation is smaller than float16 goes."""
    if not scores.numel():
        return scores.half()
    return (scores / scores.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)).half()


def read_episode(engine: Engine, session: WorkerSession, episode: wire.Episode) -> EpisodeRows:
    """An episode's rows, which `switch` can make active. Raises BadEpisode when they are not rows of this session."""
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
            f"{shape.n_kv_heads} KV heads"
        )
    for positions, budget in zip(rows.positions, session.layer_rows, strict=True):
        ascending = (positions[:, 1:] > positions[:, :-1]) | (positions[:, 1:] == EMPTY)
        inside = (positions >= 0) & ((positions < length) | (positions == EMPTY))
        if (
            not bool(ascending.all() and inside.all())
            or int((positions != EMPTY).sum()) > budget * shape.n_kv_heads
        ):
            raise BadEpisode(
                f"episode {episode.id} does not list rows 0..{length - 1}, each once and in order, within "
                f"the {budget} rows per head of a layer's budget; build it again"
            )
    return rows


def switch(
    engine: Engine, session: WorkerSession, episode: wire.Episode, rows: EpisodeRows
) -> wire.SwitchReport:
    """Make an episode's rows the active ones; only those that are not active yet are read from the store.

    Rows that are newer than the episode, and the recent window, stay active beside it, the newest first, in at most
    half of a layer's rows;
    the episode's lowest scores give way to them. Rows that a repair brought back stay as well, in their reserve. The
    session's own episode again moves nothing. Every row must be in the store. Raises RowsMissing or StorageFailed,
    then nothing has changed.
    """
    assert session.slot is not None, "only a session in a slot switches"
    started = time.perf_counter()
    report = wire.SwitchReport(episode=episode.id)
    active = Selection.of_slot(engine.cache, session.slot)
    if episode.id != session.episode:
        _make_active(engine, session, _changes(engine, session, episode, rows, active), report)
        session.episode = episode.id
        session.patched_prompt = list(episode.patched_prompt)
        session.segments = wire_values.to_near(episode.segments)
    else:
        report.rows_kept = sum(int((p != EMPTY).sum()) for p in active.positions)
    report.bytes_moved = report.rows_moved * engine.model.shape.row_bytes(engine.model.dtype)
    report.seconds = time.perf_counter() - started
    return report


@dataclass(frozen=True)
class _Change:
    """One layer's part of a switch, int64 `[n_kv_heads, m]` each, -1 for none: places that stay, positions to load.

    `shared` counts the rows that both selections hold.
    """

    stay: Tensor
    load: Tensor
    shared: int


def _changes(
    engine: Engine,
    session: WorkerSession,
    episode: wire.Episode,
    rows: EpisodeRows,
    active: Selection,
) -> list[_Change]:
    changes = []
    # What was just said stays, of whatever topic it is: the recent window is active, as every eviction leaves it.
    start = min(episode.length, session.length - engine.settings.recent)
    for layer, (held, promoted) in enumerate(zip(active.positions, active.promoted, strict=True)):
        choice = LayerChoice(session.method, session.layer_rows[layer], engine.settings.sinks)
        newer = torch.where((held >= start) & ~promoted, held, EMPTY).sort(dim=1).values
        older = torch.where(rows.positions[layer] < start, rows.positions[layer], EMPTY)
        wanted = choose_with_newer(older, rows.scores[layer].float(), newer, choice)
        wanted = position_mask(wanted, session.length)
        now = position_mask(held, session.length)
        there = held != EMPTY
        stays = wanted.gather(1, held.clamp(max=session.length - 1).long()) & there
        changes.append(
            _Change(
                mask_to_indices(stays | promoted), mask_to_indices(wanted & ~now), int(stays.sum())
            )
        )
    return changes


def _make_active(
    engine: Engine, session: WorkerSession, changes: list[_Change], report: wire.SwitchReport
) -> None:
    """Read first: what cannot be read leaves the session as it was."""
    assert session.slot is not None, "only a session in a slot switches"
    with storage():
        loaded = engine.store.gather_selection(session.name, [change.load for change in changes])
    for layer, (change, (keys, values)) in enumerate(zip(changes, loaded, strict=True)):
        engine.cache.keep(session.slot, layer, change.stay.to(engine.cache.device))
        positions = torch.where(change.load < 0, EMPTY, change.load).to(torch.int32)
        engine.cache.insert(
            session.slot,
            layer,
            positions,
            keys,
            values,
            torch.zeros_like(positions, dtype=torch.bool),
        )
        report.rows_moved += int((change.load >= 0).sum())
        report.rows_kept += change.shared
