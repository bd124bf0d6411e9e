"""Rows of an episode as a value, and their form on the wire."""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.errors import BadEpisode


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of an episode: per layer int32 positions `[n_kv_heads, m]`, ascending, `EMPTY` padded.

    scores: float16, the same shapes, 1 for the layer's highest. Rows of the lowest score are the
    first to be replaced by newer ones.
    """

    positions: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]

    @classmethod
    def from_selection(cls, positions: list[Tensor], scores: list[Tensor]) -> "EpisodeRows":
        """Build from int64 positions `[n_kv_heads, m]`, -1 as padding, and scores of that shape."""
        return cls(
            tuple(torch.where(p < 0, EMPTY, p).to(torch.int32) for p in positions),
            tuple(
                _to_half(s.masked_fill(p < 0, 0.0)) for p, s in zip(positions, scores, strict=True)
            ),
        )

    def to_bytes(self) -> bytes:
        """Serialise as safetensors: 6 bytes a row."""
        tensors = {
            f"positions.{layer}": rows.contiguous() for layer, rows in enumerate(self.positions)
        }
        tensors |= {
            f"scores.{layer}": scores.contiguous() for layer, scores in enumerate(self.scores)
        }
        return save(tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> "EpisodeRows":
        """Parse the result of `to_bytes`. Raises BadEpisode for other bytes."""
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

    def row_count(self) -> int:
        """Rows over all layers and heads."""
        return sum(int((p != EMPTY).sum()) for p in self.positions)


def _to_half(scores: Tensor) -> Tensor:
    """Scale to a maximum of 1 and convert to float16: small attention would underflow."""
    if not scores.numel():
        return scores.half()
    return (scores / scores.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)).half()
