"""The weights of a model that the native code computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Weights in 4 bits: inputs that have a scale and a middle in common, and outputs that lie together.
_GROUP, _ROWS = 32, 8


@dataclass(frozen=True, eq=False)
class Matrix:
    """A linear layer, or an embedding.

    Attributes:
        numbers: Contiguous `[outputs, inputs]`, float32, bfloat16 or int8; in 4 bits uint8 `[outputs / 8,
            inputs / 32, 160]`, see `pack_codes`.
        bias: float32 `[outputs]`; None for none.
        scales: In 8 bits that of each output, float32 `[outputs]`; else None.
    """

    numbers: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def format(self) -> str:
        """What a weight is: `float32`, `bfloat16`, `int8` or `int4`."""
        return str(self.numbers.dtype).removeprefix("torch.").replace("uint8", "int4")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        sizes = self.numbers.shape
        return (sizes[0], sizes[1]) if len(sizes) == 2 else (_ROWS * sizes[0], _GROUP * sizes[1])


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Attention to rows.

    Attributes:
        queries: Of all heads, those of a KV head one after the other, each followed by the gate of the head's
            output in a model that has these.
        keys: Of the KV heads.
        values: Of the KV heads.
        out: Of all heads' attention.
        query_norm: Of each head's query, float32 `[head_dim]`; None for none.
        key_norm: As `query_norm`.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """A gated delta net (arXiv 2412.06464).

    Attributes:
        mixed: Queries and keys of the key heads, and values of the value heads, each behind a convolution.
        gates: Of the value heads' outputs.
        strengths: How much a token writes, of each value head.
        decays: How much it forgets, of each value head.
        out: Of all value heads.
        kernel: Of the convolution, float32 `[channels, width]`.
        rates: Of the decays, float32 `[value heads]`.
        bias: Added to the decays, float32 `[value heads]`.
        norm: Of a value head's output, float32 `[value dim]`.
    """

    mixed: Matrix
    gates: Matrix
    strengths: Matrix
    decays: Matrix
    out: Matrix
    kernel: Tensor
    rates: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class DeltaHeads:
    """What the delta nets of a model have in common.

    Attributes:
        keys: Key heads.
        values: Value heads, a multiple of `keys`.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value, a multiple of 8.
        width: Of the convolution, as many of whose last inputs a state has.
        epsilon: Of the norm of outputs.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    width: int
    epsilon: float


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer: attention or a delta net, and a gated MLP, each behind an RMSNorm and added to what it read.

    Attributes:
        mixer: What mixes the tokens.
        gate: Of the MLP, whose inner numbers are `silu(gate) * up`.
        up: Of the MLP.
        down: Of the MLP.
        mixer_norm: float32 `[hidden]`.
        mlp_norm: float32 `[hidden]`.
    """

    mixer: AttentionWeights | DeltaWeights
    gate: Matrix
    up: Matrix
    down: Matrix
    mixer_norm: Tensor
    mlp_norm: Tensor


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All of a model.

    Attributes:
        layers: In their order.
        embedding: Of the vocabulary's tokens, float32 or bfloat16.
        head: Of the logits.
        norm: Before the head, float32 `[hidden]`.
        frequencies: Of the rotary embedding, float32 `[rotated / 2]`: the first `rotated` numbers of a
            head turn, number i with number `i + rotated / 2`.
        n_kv_heads: KV heads.
        group: Query heads of each.
        head_dim: Numbers of a key.
        gated: True where queries come with gates.
        delta: Of the delta nets; None for none.
        rotary_scale: Factor of the rotary embedding.
        scale: Factor of the product of a query and a key.
        epsilon: Of the layers' norms and the last one.
        head_epsilon: Of the norms of queries and keys.
    """

    layers: Sequence[LayerWeights]
    embedding: Matrix
    head: Matrix
    norm: Tensor
    frequencies: Tensor
    n_kv_heads: int
    group: int
    head_dim: int
    gated: bool
    delta: DeltaHeads | None
    rotary_scale: float
    scale: float
    epsilon: float
    head_epsilon: float


def pack_codes(codes: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    """Pack weights in 4 bits as `Group` of decode.cpp has them, uint8 `[outputs / 8, inputs / 32, 160]`.

    codes: 0 to 15, uint8 `[outputs, inputs]`; scales, middles: what a code more adds and what code 8 stands for,
    bfloat16 `[outputs, inputs / 32]`.
    """
    outputs, inputs = codes.shape
    blocks, groups = outputs // _ROWS, inputs // _GROUP
    # Two halves of a group, and four inputs of each output in a row of bytes.
    halves = codes.view(blocks, _ROWS, groups, 2, _GROUP // 8, 4).permute(3, 0, 2, 4, 1, 5)
    joined = (halves[0] | halves[1] << 4).reshape(blocks, groups, -1)
    numbers = [
        each.view(blocks, _ROWS, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for each in (scales, middles)
    ]
    return torch.cat([*numbers, joined], -1)
