"""Program of one rank: rank 0 runs a scenario on a worker, the others follow it. Alone it is a plain worker.

usage: program.py SCENARIO FOLDER OUT; run by torch's launcher, or by itself. OUT gets the scenario's result.
"""

import json
import os
import sys
from pathlib import Path

import torch

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.workers.conftest import LocalWorker
from tests.workers.parallel.scenarios import SCENARIOS, SETTINGS
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.parallel.process_group import ProcessGroup
from workers.scheduler.follower import Follower

PATIENCE = 60.0


def build_parts(folder: Path, data: Path, scenario: str, group: Group) -> Parts:
    """Build a rank's dependencies: its part of the model, and a store of its own."""
    model = load_model(folder, dtype=torch.float32, device="cpu", group=group)
    tokenizer = load_tokenizer(folder, model.eos_token_ids)
    shape = model.shape
    layout = PageLayout(
        shape.n_layers, shape.n_kv_heads, shape.head_dim, model.dtype, model.fingerprint
    )
    tiers = [RamTier(64 << 20), NvmeTier(data / f"rank-{group.index}")]
    settings = WorkerSettings(**SETTINGS.get(scenario, {}))
    return Parts(model, tokenizer, RowStore(layout, tiers), settings)


def main(scenario: str, folder: Path, out: Path) -> None:
    """Run a scenario as rank 0, or follow it."""
    torch.set_num_threads(1)
    ranked = "RANK" in os.environ
    group: Group = ProcessGroup.join("cpu", PATIENCE) if ranked else Alone()
    parts = build_parts(folder, out.with_suffix(".data"), scenario, group)
    if group.index:
        Follower(Engine(parts)).run()
    else:
        worker = LocalWorker(parts)
        try:
            found = SCENARIOS[scenario](worker)
        finally:
            worker.scheduler.close()
        found["fingerprint"] = parts.model.fingerprint
        out.write_text(json.dumps(found))
    parts.store.close()
    if isinstance(group, ProcessGroup):
        group.leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
