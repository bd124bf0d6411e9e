"""What the values of a session may be, of whatever a file or a catalog says."""

from dataclasses import dataclass

# More than any model's vocabulary, where that of the model is not known.
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Bounds:
    """The model that a session's tokens and rows are of, as far as it is known.

    `vocabulary`: token ids are smaller. `n_layers`, `n_kv_heads`: the shape of its rows; None: any.
    """

    vocabulary: int = _MOST_TOKENS
    n_layers: int | None = None
    n_kv_heads: int | None = None
