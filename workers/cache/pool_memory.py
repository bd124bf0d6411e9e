"""Memory of the slots of layers that lie on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Position of an index that holds no row. It is after every query, so causality alone masks it.
EMPTY = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class PoolMemory:
    """The tensors of slots of `capacity` rows, see `SlotPool`."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    promoted: Tensor
    accumulated: Tensor

    @classmethod
    def allocate(
        cls,
        slots: int,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        latent: bool,
    ) -> "PoolMemory":
        """Allocate empty slots of rows of `width` numbers; of latents key and value are one tensor."""
        keys = torch.zeros(slots, capacity, width, dtype=dtype, device=device)
        return cls(
            keys,
            keys if latent else torch.zeros_like(keys),
            torch.full((slots, capacity), EMPTY, dtype=torch.int32, device=device),
            torch.zeros(slots, capacity, dtype=torch.bool, device=device),
            torch.zeros(slots, capacity, dtype=torch.float32, device=device),
        )

    @property
    def capacity(self) -> int:
        """Rows of a slot."""
        return self.keys.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.keys.device

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields of `KVRows`."""
        return self.keys, self.values, self.positions, self.promoted, self.accumulated

    def clear(self, slot: int) -> None:
        """Empty a slot, and zero its keys and values."""
        self.keys[slot] = 0
        self.values[slot] = 0
        self.positions[slot] = EMPTY
        self.promoted[slot] = False
        self.accumulated[slot] = 0

    def send(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device, unless it is there."""
        return tensor.to(self.device, non_blocking=True)
