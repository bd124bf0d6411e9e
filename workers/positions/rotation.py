"""Rotation of one layer's keys and queries by positions (RoPE), as a model was found to compute it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotation of some numbers of a key, in pairs, each at an angle per position of its own.

    Attributes:
        angles: Angle of each pair per position; empty for a layer without positions.
        first: Index of the first number that is rotated.
        interleaved: A pair's numbers are neighbours; else half of all rotated numbers apart.
    """

    angles: tuple[float, ...] = ()
    first: int = 0
    interleaved: bool = False

    def build_table(self, shifts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Build cosines and sines of turns by so many positions, float32 `[shifts, pairs]` each."""
        angles = torch.tensor(self.angles, dtype=torch.float64)
        turns = torch.tensor(shifts, dtype=torch.float64)[:, None] * angles
        return turns.cos().float().to(device), turns.sin().float().to(device)

    def turn(self, vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Turn vectors `[..., head_dim]`; cosines, sines: float32 `[..., pairs]`, or broadcast to it.

        Computed in float32, so that each number is rounded once. A turn by 0 changes no bit.
        """
        return self.turn_in_place(vectors.clone(), cosines, sines) if self.angles else vectors

    def turn_in_place(self, vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Turn vectors as `turn`, where they are; returns them."""
        pairs = len(self.angles)
        part = vectors[..., self.first : self.first + 2 * pairs]
        if self.interleaved:
            left, right = part[..., 0::2], part[..., 1::2]
        else:
            left, right = part[..., :pairs], part[..., pairs:]
        a, b = left.float(), right.float()
        both = a * cosines - b * sines, b * cosines + a * sines
        left.copy_(both[0])
        right.copy_(both[1])
        return vectors
