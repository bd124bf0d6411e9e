"""Weights of a model for native decode steps, if its modules are those that they compute.

It is read off the modules, not off a list of names of architectures: norms and activations are tried,
and every parameter and buffer must have been read in the end. What a forward pass does beside its
modules, such as scaling its residuals, is found by the test at load (`self_test.py`).
"""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.cache.layer_plan import LayerPlan
from workers.cache.slot_pool import KVShape
from workers.model.weights.quantized_linear import Int4Weight, Int8Weight, QuantizedLinear
from workers.native.decoder_weights import (
    AttentionWeights,
    DecoderWeights,
    DeltaHeads,
    DeltaWeights,
    LayerWeights,
    Matrix,
    pack_codes,
)

_LANES = 8  # numbers that native code computes at once
# Rotary embeddings whose frequencies change with a session's length.
_CHANGING = ("dynamic", "longrope")


class NotCovered(Exception):
    """A model's steps are not computed natively; the text says why."""


def read_weights(
    module: PreTrainedModel, plan: LayerPlan, shape: KVShape, *, wide: bool = False
) -> DecoderWeights:
    """Read a causal LM's weights; plan and shape: of its layers' rows. Raises NotCovered.

    wide: of quantized layers not the codes, but the values that these stand for.

    Matrices in float32 whose numbers are bfloat16's are copied into half of the bytes, those in 4 bits into another
    order; all others are the model's own memory.
    """
    kept = sorted((*plan.rows, *plan.states))
    if (
        kept != list(range(plan.n_layers))
        or plan.windows
        or shape.latent
        or shape.value_dim is not None
    ):
        raise NotCovered(
            "not all of its layers are delta nets, or attend to all rows of keys and values"
        )
    kinds = {(each.device.type, each.dtype) for each in module.parameters()}
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)}):
        raise NotCovered("its weights are not all in float32, or all in bfloat16, on a CPU")
    return _Reader(module, shape, wide=wide).read(plan)


class _Reader:
    """Reads modules by their place, and keeps account of the parameters that were read."""

    def __init__(self, module: PreTrainedModel, shape: KVShape, *, wide: bool) -> None:
        self._module = module
        self._shape = shape
        self._wide = wide
        numbers = (*module.named_parameters(), *module.named_buffers())
        self._unread = {id(each): name for name, each in numbers}
        # What must be alike in all layers.
        self._scales = set[float]()
        self._epsilons = set[float]()
        self._head_epsilons = set[float]()
        self._gated = set[bool]()
        self._deltas = set[DeltaHeads]()

    def read(self, plan: LayerPlan) -> DecoderWeights:
        """Read all of the model."""
        frequencies, rotary_scale = self._read_rotary()
        layers = [
            self._read_layer(f"model.layers.{index}", recurrent=index in plan.states)
            for index in range(plan.n_layers)
        ]
        norm = self._read_norm("model.norm", self._epsilons)
        embedding = self._find("model.embed_tokens", nn.Embedding).weight
        self._take(embedding)
        table = Matrix(embedding.detach())
        head = self._read_linear("lm_head")
        if self._unread:
            raise NotCovered(f"{next(iter(self._unread.values()))} is no part of a native step")
        alike: tuple[Sized, ...]
        alike = (self._scales, self._epsilons, self._head_epsilons, self._gated, self._deltas)
        if any(len(each) > 1 for each in alike):
            raise NotCovered(
                "its layers differ in the scale of their logits, in their norms or heads"
            )
        epsilon = self._epsilons.pop()
        return DecoderWeights(
            layers,
            table,
            head,
            norm,
            frequencies,
            n_kv_heads=self._shape.n_kv_heads,
            group=self._shape.group,
            head_dim=self._shape.head_dim,
            gated=self._gated.pop(),
            delta=self._deltas.pop() if self._deltas else None,
            rotary_scale=rotary_scale,
            scale=self._scales.pop(),
            epsilon=epsilon,
            head_epsilon=self._head_epsilons.pop() if self._head_epsilons else epsilon,
        )

    def _read_layer(self, name: str, *, recurrent: bool) -> LayerWeights:
        mlp = f"{name}.mlp"
        _require_silu(self._find(f"{mlp}.act_fn"), f"{mlp}.act_fn")
        return LayerWeights(
            self._read_delta(name + ".linear_attn") if recurrent else self._read_attention(name),
            gate=self._read_linear(f"{mlp}.gate_proj"),
            up=self._read_linear(f"{mlp}.up_proj"),
            down=self._read_linear(f"{mlp}.down_proj"),
            mixer_norm=self._read_norm(f"{name}.input_layernorm", self._epsilons),
            mlp_norm=self._read_norm(f"{name}.post_attention_layernorm", self._epsilons),
        )

    def _read_attention(self, layer: str) -> AttentionWeights:
        shape, name = self._shape, f"{layer}.self_attn"
        rows, queries = shape.n_kv_heads * shape.head_dim, shape.n_heads * shape.head_dim
        self._scales.add(getattr(self._find(name), "scaling", shape.head_dim**-0.5))
        asked = self._read_linear(f"{name}.q_proj")
        self._gated.add(gated := asked.shape[0] == 2 * queries)
        if not gated and asked.shape[0] != queries:
            raise NotCovered(f"{name}.q_proj has {asked.shape[0]} outputs, not {queries}")
        return AttentionWeights(
            queries=asked,
            keys=self._read_linear(f"{name}.k_proj", rows),
            values=self._read_linear(f"{name}.v_proj", rows),
            out=self._read_linear(f"{name}.o_proj"),
            query_norm=self._read_head_norm(f"{name}.q_norm"),
            key_norm=self._read_head_norm(f"{name}.k_norm"),
        )

    def _read_delta(self, name: str) -> DeltaWeights:
        """Read a gated delta net as Qwen3.5 has it."""
        found = self._find(name)
        try:
            heads, kernel = _read_heads(found), found.conv1d.weight
            rates, bias, norm = found.A_log, found.dt_bias, found.norm.weight
        except AttributeError as error:
            raise NotCovered(f"{name} is a {type(found).__name__}, no gated delta net") from error
        if found.conv1d.bias is not None or heads.value_dim % _LANES:
            raise NotCovered(
                f"{name} has a bias of its convolution, or values of {heads.value_dim}"
            )
        self._deltas.add(heads)
        self._take(kernel, rates, bias, norm)
        channels = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim
        return DeltaWeights(
            mixed=self._read_linear(f"{name}.in_proj_qkv", channels),
            gates=self._read_linear(f"{name}.in_proj_z", heads.values * heads.value_dim),
            strengths=self._read_linear(f"{name}.in_proj_b", heads.values),
            decays=self._read_linear(f"{name}.in_proj_a", heads.values),
            out=self._read_linear(f"{name}.out_proj"),
            kernel=kernel.detach().float().squeeze(1).contiguous(),
            rates=rates.detach().float().exp(),
            bias=bias.detach().float().contiguous(),
            norm=norm.detach().float().contiguous(),
        )

    def _read_linear(self, name: str, outputs: int | None = None) -> Matrix:
        found = self._find(name, nn.Linear, QuantizedLinear)
        few = found if isinstance(found, QuantizedLinear) else None
        linear = found if few is None else self._find(f"{name}.wide", nn.Linear)
        if outputs not in (None, linear.out_features):
            raise NotCovered(f"{name} has {linear.out_features} outputs, not {outputs}")
        self._take(linear.weight, linear.bias)
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        if few is not None and not self._wide:
            return _read_codes(few.narrow, linear, bias, name)
        return Matrix(_narrow(linear.weight.detach().contiguous()), bias)

    def _read_norm(self, name: str, epsilons: set[float]) -> Tensor:
        norm = self._find(name)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
            raise NotCovered(f"{name} is no RMSNorm, but a {type(norm).__name__}")
        self._take(weight)
        epsilons.add(epsilon)
        numbers = weight.detach().float().contiguous()
        # Some models keep the distance of a factor from 1.
        for factors in (numbers, 1 + numbers):
            if _normalizes(norm, factors, epsilon, weight.dtype):
                return factors
        raise NotCovered(f"{name} is no RMSNorm, but a {type(norm).__name__}")

    def _read_head_norm(self, name: str) -> Tensor | None:
        """Read the norm of each head's queries or keys, if there is one."""
        parent, _, own = name.rpartition(".")
        if getattr(self._find(parent), own, None) is None:
            return None
        norm = self._read_norm(name, self._head_epsilons)
        if len(norm) != self._shape.head_dim:
            raise NotCovered(f"{name} normalizes all heads together")
        return norm

    def _read_rotary(self) -> tuple[Tensor, float]:
        """Read the rotary embedding's frequencies and its factor."""
        rotary = self._find("model.rotary_emb")
        kind = str(getattr(rotary, "rope_type", "unknown"))
        frequencies = getattr(rotary, "inv_freq", None)
        if any(each in kind for each in _CHANGING) or not isinstance(frequencies, Tensor):
            raise NotCovered(f"its rotary embedding is of the kind {kind!r}")
        self._take(frequencies, getattr(rotary, "original_inv_freq", None))
        scale = float(getattr(rotary, "attention_scaling", 1.0))
        return frequencies.detach().float().contiguous(), scale

    def _find(self, name: str, *kinds: type[nn.Module]) -> Any:
        """Find a module by its name: of one of the types, if some are given, and of none that derives from them."""
        try:
            found = self._module.get_submodule(name)
        except AttributeError as error:
            raise NotCovered(f"it has no {name}") from error
        if kinds and type(found) not in kinds:
            raise NotCovered(f"{name} is a {type(found).__name__}, not a {kinds[0].__name__}")
        return found

    def _take(self, *numbers: Tensor | None) -> None:
        for each in numbers:
            self._unread.pop(id(each), None)


def _read_codes(
    weight: Int8Weight | Int4Weight, wide: nn.Linear, bias: Tensor | None, name: str
) -> Matrix:
    """Read a quantized weight in its few bits; wide: the same values."""
    if isinstance(weight, Int8Weight):
        return Matrix(weight.codes, bias, weight.scales.float())
    found = weight.read_codes(wide.weight)
    if found is None:
        raise NotCovered(f"{name} has weights that are not those of their codes")
    return Matrix(pack_codes(*found), bias)


def _narrow(weight: Tensor) -> Tensor:
    """Copy a matrix into bfloat16 if that loses nothing."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _read_heads(delta: Any) -> DeltaHeads:
    """Read what a delta net is. Raises AttributeError for another module."""
    return DeltaHeads(
        keys=delta.num_k_heads,
        values=delta.num_v_heads,
        key_dim=delta.head_k_dim,
        value_dim=delta.head_v_dim,
        width=delta.conv_kernel_size,
        epsilon=delta.norm.variance_epsilon,
    )


@torch.inference_mode()
def _normalizes(norm: nn.Module, factors: Tensor, epsilon: float, dtype: torch.dtype) -> bool:
    """Check that a module divides by the root of the mean square, and then multiplies by `factors`."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, factors.shape[-1], generator=random)
    # Some so small that the epsilon counts.
    numbers = (numbers * torch.tensor([[1.0], [30.0], [epsilon**0.5], [0.01]])).to(dtype)
    square = numbers.float().square().mean(-1, keepdim=True)
    expected = numbers.float() * (square + epsilon).rsqrt() * factors
    close = 1e-4 if dtype == torch.float32 else 2e-2
    return torch.allclose(norm(numbers).float(), expected, rtol=close, atol=close)


@torch.inference_mode()
def _require_silu(activation: nn.Module, name: str) -> None:
    """Raise NotCovered unless a module is SiLU."""
    numbers = torch.linspace(-20.0, 20.0, 101)
    if not torch.allclose(activation(numbers), nn.functional.silu(numbers), atol=1e-5):
        raise NotCovered(f"{name} is a {type(activation).__name__}, not SiLU")
