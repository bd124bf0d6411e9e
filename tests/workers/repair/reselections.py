"""What tests of re-selections share: settings, an answer without them, and what is active then."""

from typing import Any

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.drive import compute_pending, drive
from workers.cache.active_cache import EMPTY
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession
from workers.repair.reselection import TurnReselections, reselect

SMALL: dict[str, Any] = {
    "method": "loopserve",
    "budget": 48,
    "method_settings": '{"every": 4, "first": 4, "window": 8}',
}


def active(worker: Any, name: str = "s") -> list[list[list[int]]]:
    """Positions that are active, per layer and head."""
    session = worker.engine.session(name)
    held = Selection.from_slot(worker.engine.cache, session.slot).positions
    return [[[p for p in head if p != EMPTY] for head in layer.tolist()] for layer in held]


def stored_keys(worker: Any, name: str = "s") -> Tensor:
    """All of a session's keys, `[n_layers, n_kv_heads, length, head_dim]`."""
    session = worker.engine.session(name)
    worker.engine.store_io.wait_written(session)
    return worker.engine.store.gather(name, torch.arange(session.length))[:, 0]


def speak(worker: Any, count: int, name: str = "s") -> ResidentSession:
    """Append some tokens one by one, as an answer, without re-selection."""
    engine = worker.engine
    resident = compute_pending(engine, name)
    resident.session.clear_turn()
    resident.session.turn_start = resident.session.length
    for token in range(40, 40 + count):
        engine.forward([resident], torch.tensor([[token]]))
    return resident


def run(worker: Any, resident: ResidentSession, output_tokens: int) -> pb.ReselectionReport:
    turn = TurnReselections()
    drive(reselect(worker.engine, resident, output_tokens, turn))
    worker.check()
    return turn.report
