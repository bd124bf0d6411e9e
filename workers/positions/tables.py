"""Cosines and sines of the turns between chunks, which many passes share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.positions.rotation import Rotation

# Turns of a rotation that are kept: sessions in different chunks of their windows have others.
_MOST = 64

# A rotation, and the cosines and sines of its turns.
Turns = tuple[Rotation, Tensor, Tensor]


class RotationTables:
    """Turns of a model's layers of one kind. For one thread at a time."""

    def __init__(self, rotations: Sequence[Rotation]) -> None:
        """Take the rotation of each layer."""
        self._distinct = list(dict.fromkeys(rotations))
        self._of_layer = [self._distinct.index(each) for each in rotations]
        self._turns: dict[tuple[int, tuple[int, ...], torch.device], Turns] = {}

    def get(self, layer: int, shifts: tuple[int, ...], device: torch.device) -> Turns:
        """Get a layer's rotation, and cosines and sines of turns by `shifts`, float32 `[shifts, pairs]`."""
        key = (self._of_layer[layer], shifts, device)
        if key not in self._turns:
            if len(self._turns) >= _MOST:
                self._turns.clear()
            rotation = self._distinct[key[0]]
            self._turns[key] = (rotation, *rotation.build_table(shifts, device))
        return self._turns[key]
