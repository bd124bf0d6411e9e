"""What each layer of a model keeps of its past."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.cache.window import Window


@dataclass(frozen=True)
class LayerPlan:
    """The layers of a model by what they keep; a layer may keep two things, or nothing.

    Attributes:
        n_layers: All layers of the model.
        rows: Indices of the layers whose rows a session selects, evicts and retrieves, ascending. Row
            layer i is the model's layer `rows[i]`.
        windows: Reach of the layers that see the newest rows alone, by layer.
        states: Number of recurrent states, by layer.
        shared: Layers that attend to another layer's rows, and that layer.
    """

    n_layers: int
    rows: tuple[int, ...]
    windows: Mapping[int, Window] = field(default_factory=dict)
    states: Mapping[int, int] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def full(cls, n_layers: int) -> "LayerPlan":
        """Build the plan of a model whose layers all attend to all rows."""
        return cls(n_layers, tuple(range(n_layers)))

    def describe(self, layer: int) -> str:
        """Name the kind of a layer, for messages."""
        kinds = [
            *(["full attention"] if layer in self.rows else []),
            *([f"a {self.windows[layer].describe()}"] if layer in self.windows else []),
            *(["a recurrent state"] if layer in self.states else []),
            *([f"the rows of layer {self.shared[layer]}"] if layer in self.shared else []),
        ]
        return " and ".join(kinds) or "no past"

    @property
    def kinds(self) -> list[str]:
        """Kinds of the layers, for messages."""
        return sorted({self.describe(layer) for layer in range(self.n_layers)})
