"""Weights of a model for native decode steps, if its modules are those that they compute.

It is read off the modules, not off a list of names of architectures: norms and activations are tried,
and every parameter and buffer must have been read in the end. What a forward pass does beside its
modules, such as scaling its residuals, is found by the test at load (`self_test.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.cache.layer_plan import LayerPlan
from workers.cache.slot_pool import KVShape
from workers.model.weights.quantized_linear import Int4Weight, Int8Weight, QuantizedLinear
from workers.native.decoder_weights import DecoderWeights, LayerWeights, Matrix, pack_codes

# Rotary embeddings whose frequencies change with a session's length.
_CHANGING = ("dynamic", "longrope")


class NotCovered(Exception):
    """A model's steps are not computed natively; the text says why."""


def read_weights(module: PreTrainedModel, plan: LayerPlan, shape: KVShape) -> DecoderWeights:
    """Read a causal LM's weights; plan and shape: of its layers' rows. Raises NotCovered.

    Matrices in float32 whose numbers are bfloat16's are copied into half of the bytes, those in 4 bits into another
    order; all others are the model's own memory.
    """
    if plan != LayerPlan.full(plan.n_layers) or shape.latent or shape.value_dim is not None:
        raise NotCovered("not all of its layers attend to all rows of keys and values")
    kinds = {(each.device.type, each.dtype) for each in module.parameters()}
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)}):
        raise NotCovered("its weights are not all in float32, or all in bfloat16, on a CPU")
    return _Reader(module, shape).read(plan.n_layers)


class _Reader:
    """Reads modules by their place, and keeps account of the parameters that were read."""

    def __init__(self, module: PreTrainedModel, shape: KVShape) -> None:
        self._module = module
        self._shape = shape
        numbers = (*module.named_parameters(), *module.named_buffers())
        self._unread = {id(each): name for name, each in numbers}
        # What must be alike in all layers.
        self._scales = set[float]()
        self._epsilons = set[float]()
        self._head_epsilons = set[float]()

    def read(self, n_layers: int) -> DecoderWeights:
        """Read all of the model."""
        frequencies, rotary_scale = self._read_rotary()
        layers = [self._read_layer(f"model.layers.{index}") for index in range(n_layers)]
        norm = self._read_norm("model.norm", self._epsilons)
        embedding = self._find("model.embed_tokens", nn.Embedding).weight
        self._take(embedding)
        table = Matrix(embedding.detach())
        head = self._read_linear("lm_head")
        if self._unread:
            raise NotCovered(f"{next(iter(self._unread.values()))} is no part of a native step")
        if max(map(len, (self._scales, self._epsilons, self._head_epsilons))) > 1:
            raise NotCovered("its layers differ in the scale of their logits or in their norms")
        epsilon = self._epsilons.pop()
        return DecoderWeights(
            layers,
            table,
            head,
            norm,
            frequencies,
            n_kv_heads=self._shape.n_kv_heads,
            group=self._shape.group,
            rotary_scale=rotary_scale,
            scale=self._scales.pop(),
            epsilon=epsilon,
            head_epsilon=self._head_epsilons.pop() if self._head_epsilons else epsilon,
        )

    def _read_layer(self, name: str) -> LayerWeights:
        shape, attention, mlp = self._shape, f"{name}.self_attn", f"{name}.mlp"
        rows, queries = shape.n_kv_heads * shape.head_dim, shape.n_heads * shape.head_dim
        self._scales.add(getattr(self._find(attention), "scaling", shape.head_dim**-0.5))
        _require_silu(self._find(f"{mlp}.act_fn"), f"{mlp}.act_fn")
        return LayerWeights(
            queries=self._read_linear(f"{attention}.q_proj", queries),
            keys=self._read_linear(f"{attention}.k_proj", rows),
            values=self._read_linear(f"{attention}.v_proj", rows),
            out=self._read_linear(f"{attention}.o_proj"),
            gate=self._read_linear(f"{mlp}.gate_proj"),
            up=self._read_linear(f"{mlp}.up_proj"),
            down=self._read_linear(f"{mlp}.down_proj"),
            attention_norm=self._read_norm(f"{name}.input_layernorm", self._epsilons),
            mlp_norm=self._read_norm(f"{name}.post_attention_layernorm", self._epsilons),
            query_norm=self._read_head_norm(f"{attention}.q_norm"),
            key_norm=self._read_head_norm(f"{attention}.k_norm"),
        )

    def _read_linear(self, name: str, outputs: int | None = None) -> Matrix:
        found = self._find(name, nn.Linear, QuantizedLinear)
        few = found if isinstance(found, QuantizedLinear) else None
        linear = found if few is None else self._find(f"{name}.wide", nn.Linear)
        if outputs not in (None, linear.out_features):
            raise NotCovered(f"{name} has {linear.out_features} outputs, not {outputs}")
        self._take(linear.weight, linear.bias)
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        if few is not None:
            return _read_codes(few.narrow, linear, bias, name)
        return Matrix(_narrow(linear.weight.detach().contiguous()), bias)

    def _read_norm(self, name: str, epsilons: set[float]) -> Tensor:
        norm = self._find(name)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
            raise NotCovered(f"{name} is no RMSNorm, but a {type(norm).__name__}")
        _require_norm(norm, weight, epsilon, name)
        self._take(weight)
        epsilons.add(epsilon)
        return weight.detach().float().contiguous()

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


@torch.inference_mode()
def _require_norm(norm: nn.Module, weight: Tensor, epsilon: float, name: str) -> None:
    """Raise NotCovered unless a module divides by the root of the mean square, and then multiplies."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, weight.shape[-1], generator=random)
    # Some so small that the epsilon counts.
    numbers = (numbers * torch.tensor([[1.0], [30.0], [epsilon**0.5], [0.01]])).to(weight.dtype)
    square = numbers.float().square().mean(-1, keepdim=True)
    expected = numbers.float() * (square + epsilon).rsqrt() * weight.float()
    close = 1e-4 if weight.dtype == torch.float32 else 2e-2
    if not torch.allclose(norm(numbers).float(), expected, rtol=close, atol=close):
        raise NotCovered(f"{name} is no RMSNorm, but a {type(norm).__name__}")


@torch.inference_mode()
def _require_silu(activation: nn.Module, name: str) -> None:
    """Raise NotCovered unless a module is SiLU."""
    numbers = torch.linspace(-20.0, 20.0, 101)
    if not torch.allclose(activation(numbers), nn.functional.silu(numbers), atol=1e-5):
        raise NotCovered(f"{name} is a {type(activation).__name__}, not SiLU")
