"""Passes of a model in bfloat16 that compute in float32, from the weights as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from workers.model.weights.quantized_linear import QuantizedLinear

# Outputs whose weights are in float32 at once: no second copy of the model in memory.
_OUTPUTS = 1024


class _WideLinear(nn.Module):
    """A linear layer that multiplies in float32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[..., in_features]` to float32 `[..., out_features]`."""
        wide, weights = inputs.float(), torch.split(self.layer.weight, _OUTPUTS)
        parts = [linear(wide, each.float()) for each in weights]
        out = torch.cat(parts, -1)
        return out if self.layer.bias is None else out + self.layer.bias.float()


class _WideEmbedding(nn.Module):
    """An embedding in float32."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up `[...]` in float32, `[..., dim]`."""
        found: Tensor = self.table(token_ids)
        return found.float()


@contextmanager
def widen(module: nn.Module) -> Iterator[None]:
    """Let a model's passes compute in float32; those of quantized layers from their values in bfloat16.

    For one thread, of models whose linear layers and embeddings are modules of these types. Norms, convolutions
    and other small weights are in memory twice meanwhile.
    """
    replaced = [
        (parent, name, child)
        for parent in list(module.modules())
        if not isinstance(parent, QuantizedLinear)
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear | nn.Embedding | QuantizedLinear)
    ]
    large = {id(each) for *_, child in replaced for each in child.parameters()}
    numbers = (*module.parameters(), *module.buffers())
    small = [
        (each, each.data)
        for each in numbers
        if each.dtype == torch.bfloat16 and id(each) not in large
    ]
    try:
        for parent, name, child in replaced:
            setattr(parent, name, _widen(child))
        for each, own in small:
            each.data = own.float()
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
        for each, own in small:
            each.data = own


def _widen(layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        return _WideEmbedding(layer)
    wide = layer.wide if isinstance(layer, QuantizedLinear) else layer
    assert isinstance(wide, nn.Linear), "weights are packed after steps are tested"
    return _WideLinear(wide)
