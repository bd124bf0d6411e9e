"""What the ranks of a test's worker are built from, alike on all of them."""

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvrecall_server.app import wiring
from kvrecall_server.app.settings import Settings
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from workers.cache.row_packing import build_row_layout
from workers.engine.engine import Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import load_tokenizer
from workers.parallel.process_group import ProcessGroup

# Between two tests nobody says anything.
PATIENCE = 300.0


@dataclass(frozen=True)
class Plan:
    """A worker of a test; the arguments are those of the fixture `make_worker`."""

    model: Path
    tokenizer: Path
    data: Path
    ram_pages: int
    window: int | None = None
    layer_sensitivity: tuple[float, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self, group: ProcessGroup) -> Parts:
        """Build a rank's dependencies: its part of the model, and a store of its own."""
        model = _load(self.model, group)
        tokenizer = load_tokenizer(self.tokenizer, model.eos_token_ids)
        model = model if self.window is None else replace(model, max_context=self.window)
        layout = build_row_layout(model.shape, model.side, model.dtype, model.fingerprint)
        tiers: list[Tier] = [
            RamTier(self.ram_pages * layout.page_bytes),
            NvmeTier(self.data / f"rank-{group.index}"),
        ]
        settings = WorkerSettings(**self.settings)
        return Parts(model, tokenizer, RowStore(layout, tiers), settings, self.layer_sensitivity)


@dataclass(frozen=True)
class WiredPlan:
    """A worker as the command builds it, of an operator's settings; `environment`: what it needs of it."""

    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)

    def build(self, group: ProcessGroup) -> Parts:
        """Build a rank's dependencies."""
        os.environ.update(self.environment)
        return wiring.build_parts(self.settings, group=group)


@cache
def _load(model: Path, group: ProcessGroup) -> LoadedModel:
    return load_model(model, dtype=torch.float32, device="cpu", group=group)
