"""The rows of a session that are active, as a value that outlives slot and process."""

from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache, KVRows


@dataclass(frozen=True)
class Selection:
    """Positions of active rows: per layer int32 `[n_kv_heads, m]`, ascending, `EMPTY` as padding.

    promoted: bool, the same shapes: rows that a repair promoted.
    accumulated: float32, the same shapes: sums over the rows' queries, for methods that accumulate;
    empty for the others.
    """

    positions: tuple[Tensor, ...]
    promoted: tuple[Tensor, ...]
    accumulated: tuple[Tensor, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialise as safetensors."""
        fields = {
            "positions": self.positions,
            "promoted": self.promoted,
            "accumulated": self.accumulated,
        }
        return save(
            {
                f"{field}.{layer}": tensor
                for field, layers in fields.items()
                for layer, tensor in enumerate(layers)
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Selection":
        """Parse the result of `to_bytes`."""
        tensors = load(data)

        def layers(field: str) -> tuple[Tensor, ...]:
            count = sum(name.startswith(f"{field}.") for name in tensors)
            return tuple(tensors[f"{field}.{layer}"] for layer in range(count))

        return cls(layers("positions"), layers("promoted"), layers("accumulated"))

    @classmethod
    def from_slot(cls, cache: ActiveCache, slot: int, *, accumulated: bool = False) -> "Selection":
        """Copy the positions of a slot's rows to the CPU."""
        layers = [cache.read(slot, layer) for layer in range(cache.shape.n_layers)]
        return cls(
            tuple(_to_cpu(rows.positions) for rows in layers),
            tuple(_to_cpu(rows.promoted) for rows in layers),
            tuple(_to_cpu(rows.accumulated) for rows in layers) if accumulated else (),
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        layers = (*self.positions, *self.promoted, *self.accumulated)
        return sum(int(layer.nbytes) for layer in layers)

    def store_positions(self) -> list[Tensor]:
        """Positions in the row store's form: per layer int64 `[n_kv_heads, m]`, -1 as padding."""
        return [torch.where(p == EMPTY, -1, p).to(torch.int64) for p in self.positions]

    def with_rows(self, layer: int, keys: Tensor, values: Tensor) -> KVRows:
        """The rows of a layer: keys and values `[n_kv_heads, m, head_dim]` of its positions."""
        positions = self.positions[layer]
        sums = self.accumulated[layer] if self.accumulated else torch.zeros(positions.shape)
        return KVRows(keys, values, positions, self.promoted[layer], sums)

    def row_counts(self) -> list[int]:
        """Rows per layer, summed over the heads."""
        return [int((p != EMPTY).sum()) for p in self.positions]

    def rows_per_head(self) -> list[int]:
        """Rows per head, per layer: the mean over the heads, rounded up."""
        return [-(-n // p.shape[0]) for n, p in zip(self.row_counts(), self.positions, strict=True)]

    def fully_active_tokens(self) -> int:
        """Count the tokens that are active in every layer and head."""
        rows = torch.cat([positions.flatten() for positions in self.positions])
        counts = torch.bincount(rows[rows != EMPTY])  # sorting them takes thirty times as long
        return int((counts == sum(p.shape[0] for p in self.positions)).sum())


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True).contiguous()
