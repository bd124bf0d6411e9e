"""The weights of a dense model that the native code computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """A linear layer: numbers `[outputs, inputs]`, float32 or bfloat16, and a bias, float32 `[outputs]`."""

    numbers: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer: attention and a gated MLP, each behind an RMSNorm and added to what it read.

    Attributes:
        queries: Of all heads, those of a KV head one after the other.
        keys: Of the KV heads.
        values: Of the KV heads.
        out: Of all heads' attention.
        gate: Of the MLP, whose inner numbers are `silu(gate) * up`.
        up: Of the MLP.
        down: Of the MLP.
        attention_norm: float32 `[hidden]`.
        mlp_norm: float32 `[hidden]`.
        query_norm: Of each head's query, float32 `[head_dim]`; None for none.
        key_norm: As `query_norm`.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All of a model.

    Attributes:
        layers: In their order.
        embedding: `[vocabulary, hidden]`, float32 or bfloat16.
        head: Of the logits.
        norm: Before the head, float32 `[hidden]`.
        frequencies: Of the rotary embedding, float32 `[rotated / 2]`: the first `rotated` numbers of a
            head turn, number i with number `i + rotated / 2`.
        n_kv_heads: KV heads.
        group: Query heads of each.
        rotary_scale: Factor of the rotary embedding.
        scale: Factor of the product of a query and a key.
        epsilon: Of the layers' norms and the last one.
        head_epsilon: Of the norms of queries and keys.
    """

    layers: Sequence[LayerWeights]
    embedding: Tensor
    head: Matrix
    norm: Tensor
    frequencies: Tensor
    n_kv_heads: int
    group: int
    rotary_scale: float
    scale: float
    epsilon: float
    head_epsilon: float
