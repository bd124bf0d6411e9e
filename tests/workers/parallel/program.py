"""Program of one rank: rank 0 runs scenarios on a worker, the others follow it. Alone it is a plain worker.

usage: program.py CASES OUT; run by torch's launcher, or by itself. CASES is JSON, scenario and folder of a model
by name. OUT gets by name what each found.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kvstore.errors import TierError
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.workers.conftest import LocalWorker
from tests.workers.parallel.scenarios import SCENARIOS, SETTINGS
from workers.cache.row_packing import build_row_layout
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.engine.stored.stored_sessions import build_state_layout
from workers.errors import ModelRefused
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.parallel.process_group import ProcessGroup
from workers.scheduler.follower import Follower

PATIENCE = 60.0


class FlakyStore(RowStore):
    """A store of rows that fails once for the sessions that are named so."""

    failed: frozenset[str] = frozenset()

    def gather_selection(
        self, session: str, selection: Sequence[Tensor], *, promote: bool = True
    ) -> list[tuple[Tensor, Tensor]]:
        """Fail to read the rows of a slot."""
        self._fail_once(session, "unreadable")
        return super().gather_selection(session, selection, promote=promote)

    def begin_flush(self, session: str) -> "Future[bool]":
        """Fail to make rows durable."""
        self._fail_once(session, "unwritable")
        return super().begin_flush(session)

    def _fail_once(self, session: str, name: str) -> None:
        if session == name and name not in self.failed:
            self.failed |= {name}
            raise TierError("this rank's disk failed")


def build_parts(folder: Path, data: Path, scenario: str, group: Group) -> Parts:
    """Build a rank's dependencies: its part of the model, and a store of its own."""
    model = load_model(folder, dtype=torch.float32, device="cpu", group=group)
    tokenizer = load_tokenizer(folder, model.eos_token_ids)
    shape = model.shape
    layout = build_row_layout(shape, model.side, model.dtype, model.fingerprint)
    kind = FlakyStore if scenario == "failure" and group.index == 1 else RowStore
    store = kind(layout, [RamTier(64 << 20), NvmeTier(data / f"rank-{group.index}")])
    states = None
    if model.state_bytes:
        layout = build_state_layout(model.state_bytes, model.fingerprint)
        states = RowStore(layout, [RamTier(64 << 20), NvmeTier(data / f"states-{group.index}")])
    settings = WorkerSettings(**SETTINGS.get(scenario, {}))
    return Parts(model, tokenizer, store, settings, states=states)


def serve(parts: Parts, scenario: str) -> dict[str, Any]:
    """Run a scenario as rank 0, or follow it."""
    found: dict[str, Any] = {}
    if parts.model.group.index:
        Follower(Engine(parts)).run()
    else:
        worker = LocalWorker(parts)
        try:
            found = SCENARIOS[scenario](worker)
        finally:
            worker.scheduler.close()
    parts.store.close()
    return found | {"fingerprint": parts.model.fingerprint, "sizes": measure(parts)}


def measure(parts: Parts) -> list[int]:
    """Measure a rank: bytes of its weights, of a token's rows, of a slot's windows, of recurrent states."""
    model = parts.model
    weights = {id(each): each for each in model.module.parameters()}.values()
    local = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
    sizes = [parts.store.layout.token_bytes, model.get_side_bytes(64), model.state_bytes]
    return [sum(each.nbytes for each in local), *sizes]


def main(cases: Mapping[str, tuple[str, str]], out: Path) -> None:
    """Run scenarios one after the other, each with the model of a folder, which may be refused."""
    torch.set_num_threads(1)
    group: Group = ProcessGroup.join("cpu", PATIENCE) if "RANK" in os.environ else Alone()
    found: dict[str, Any] = {}
    for name, (scenario, folder) in cases.items():
        data = out.with_suffix(".data") / name
        try:
            parts = build_parts(Path(folder), data, scenario, group)
        except ModelRefused as error:
            found[name] = {"refused": str(error)}
        else:
            found[name] = serve(parts, scenario)
    if group.index == 0:
        out.write_text(json.dumps(found))
    if isinstance(group, ProcessGroup):
        group.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
