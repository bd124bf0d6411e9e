"""Linear layers in bfloat16 on CPUs whose weights are also kept in 8 or 4 bits, for single tokens.

Decoding is bound by the bytes of the weights that it reads: torch's own kernels read these ones. They
are slow at many tokens at once; those run over the same values in bfloat16.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.model.layers.latent import find_read_weights
from workers.model.weights.share_left import log_share_left

Quantization = Literal["int8", "int4"]

# Shapes that both kernels take: multiples of these numbers of outputs and inputs.
_OUTPUTS = 16
_INPUTS = 32

# Inputs that share a scale and a zero in 4 bits: the fewest that the kernel takes.
_GROUP = 32


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """Codes, int8 `[out_features, in_features]`, times a scale per output, bfloat16.

    Attributes:
        max_tokens: Tokens above which the same product in bfloat16 is as fast (`docs/benchmarks.md`).
    """

    codes: Tensor
    scales: Tensor
    max_tokens: int = 4

    def multiply(self, inputs: Tensor) -> Tensor:
        """Map bfloat16 `[n, in_features]` to `[n, out_features]`."""
        return torch._weight_int8pack_mm(inputs, self.codes, self.scales)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """Codes 0 to 15 in the layout of torch's kernel, which is its own.

    Attributes:
        scales: Per group of inputs and output the scale, and the value that code 8 stands for, bfloat16
            `[in_features / 32, out_features, 2]`.
        max_tokens: As of `Int8Weight`.
    """

    codes: Tensor
    scales: Tensor
    max_tokens: int = 8

    def multiply(self, inputs: Tensor) -> Tensor:
        """Map bfloat16 `[n, in_features]` to `[n, out_features]`."""
        return torch._weight_int4pack_mm_for_cpu(inputs, self.codes, _GROUP, self.scales)

    def read_codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Read the codes from the values that they stand for, bfloat16 `[out_features, in_features]`.

        Returns codes, uint8 of that shape, and scales and middles, bfloat16 `[out_features, in_features / 32]`; None
        where the values are not those of codes.
        """
        scales, middles = (each.T.contiguous() for each in self.scales.unbind(-1))
        groups = values.view(len(values), -1, _GROUP)
        step, middle = scales.float()[..., None], middles.float()[..., None]
        codes = ((groups.float() - middle) / step).round_().add_(8).clamp_(0, 15)
        same = torch.equal(((codes - 8) * step + middle).to(values.dtype), groups)
        return (codes.to(torch.uint8).view(values.shape), scales, middles) if same else None


class QuantizedLinear(nn.Module):
    """A linear layer of a quantized weight, and of the same values in bfloat16 for many tokens.

    Attributes:
        narrow: The weight in few bits.
        wide: The layer in bfloat16.
    """

    def __init__(self, linear: nn.Linear, quantization: Quantization) -> None:
        """Quantize a layer's weight. The layer is taken over, with the quantized values."""
        super().__init__()
        weight = linear.weight.detach().float()
        self.narrow: Int8Weight | Int4Weight
        self.narrow, values = _to_int8(weight) if quantization == "int8" else _to_int4(weight)
        linear.weight = nn.Parameter(values.to(linear.weight.dtype), requires_grad=False)
        self._bias = linear.bias
        self.wide: nn.Module = linear

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if flat.shape[0] > self.narrow.max_tokens:
            wide: Tensor = self.wide(inputs)
            return wide
        out = self.narrow.multiply(flat)
        if self._bias is not None:
            out = out + self._bias
        return out.view(*inputs.shape[:-1], -1)


def quantize_linears(model: PreTrainedModel, quantization: Quantization) -> None:
    """Replace the linear layers of a bfloat16 model on a CPU by quantized ones, layer by layer.

    The output layer, often tied to the embedding, stays as it is: its errors are errors of the
    logits. So do layers of shapes that torch's kernels do not take. The projections of latents stay,
    and experts, whose weights are no linear layers: the log says what share of the numbers they are.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    kept: set[nn.Module] = {head, *find_read_weights(model)}
    log_share_left(model, "weights are not quantized")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child not in kept and _has_kernel(child):
                setattr(parent, name, QuantizedLinear(child, quantization))


def _has_kernel(linear: nn.Linear) -> bool:
    """Check a layer's shape: with other numbers of inputs the 8-bit kernel computes nonsense."""
    return linear.out_features % _OUTPUTS == 0 and linear.in_features % _INPUTS == 0


def _to_int8(weight: Tensor) -> tuple[Int8Weight, Tensor]:
    """The codes of a weight, float32 `[out_features, in_features]`, and the values they stand for."""
    scales = _to_scales(weight.abs().amax(1, keepdim=True) / 127)
    codes = (weight / scales).round_().clamp_(-127, 127)
    return Int8Weight(codes.to(torch.int8), scales[:, 0].bfloat16()), codes * scales


def _to_int4(weight: Tensor) -> tuple[Int4Weight, Tensor]:
    """As `_to_int8`; the codes of a group reach from its least to its greatest value."""
    groups = weight.view(len(weight), -1, _GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = _to_scales((high - low) / 15)
    middles = (low + 8 * scales).bfloat16().float()
    codes = ((groups - middles) / scales).round_().add_(8).clamp_(0, 15)
    values = (codes - 8) * scales + middles
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
    both = torch.cat([scales, middles], -1).transpose(0, 1).contiguous()
    return Int4Weight(packed, both.bfloat16()), values.flatten(1)


def _to_scales(steps: Tensor) -> Tensor:
    """Scales of bfloat16 precision in float32; not 0, which weights would be divided by."""
    return steps.clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16().float()
