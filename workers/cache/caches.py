"""The slots of a model: active rows, and what its other layers keep."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import ActiveCache
from workers.cache.devices import Devices, list_devices
from workers.cache.forward_step import ForwardStep
from workers.cache.side_cache import SideCache, SideShape
from workers.cache.slot_pool import KVShape
from workers.parallel.alone import Alone
from workers.parallel.group import Group


@dataclass(frozen=True)
class Caches:
    """Slots of the same numbers: of managed rows, and of windows and states where layers have them."""

    active: ActiveCache
    side: SideCache | None = None

    @classmethod
    def create(
        cls,
        shape: KVShape,
        side: SideShape | None,
        slots: int,
        rows: Sequence[int],
        room: int,
        dtype: torch.dtype,
        device: Devices,
        group: Group = Alone(),
    ) -> "Caches":
        """Allocate the slots.

        rows: as `ActiveCache`; room: tokens of the longest pass; device: of the model's layers; group: of the
        ranks that have the other heads.
        """
        if side is None:
            return cls(ActiveCache(shape, slots, rows, dtype, device, group=group))
        beside = SideCache(side, slots, room, dtype, device)
        devices = list_devices(device, side.plan.n_layers)
        own = [devices[layer] for layer in side.plan.rows]
        return cls(ActiveCache(shape, slots, rows, dtype, own, beside, group), beside)

    def begin(
        self,
        slots: Sequence[int],
        query_positions: Tensor,
        observe: int = 0,
        *,
        static: bool = False,
    ) -> ForwardStep:
        """Begin a pass over slots; parameters as `ForwardStep`."""
        return ForwardStep(
            self.active, slots, query_positions, observe, static=static, side=self.side
        )
