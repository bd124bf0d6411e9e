"""Linear layers in bfloat16 on CPUs, with weights packed once in the layout that oneDNN reads."""

import torch
from torch import Tensor, nn

from workers.model.layers.latent import find_read_weights
from workers.model.weights.share_left import log_share_left
from workers.primitives.products import cpu_has_bfloat16

_ONEDNN = torch.ops.mkldnn  # what torch's own compiler packs the weights of a frozen model with


class PackedLinear(nn.Module):
    """A linear layer of a packed weight: torch packs that of `nn.Linear` again in every call."""

    def __init__(self, linear: nn.Linear) -> None:
        """Pack the layer's weight; the layer itself stays as it is."""
        super().__init__()
        self.bias = linear.bias
        # For single tokens: decoding reads every weight for each.
        self.packed: Tensor = _ONEDNN._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        out: Tensor = _ONEDNN._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        return out


def can_pack(module: nn.Module) -> bool:
    """Check if the weights are bfloat16 and on a CPU for whose instructions oneDNN packs them."""
    weight = next(module.parameters())
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and cpu_has_bfloat16()


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers in the module by packed ones, layer by layer.

    Projections of latents stay, whose weights are read, and experts, whose weights are no linear
    layers: the log says what share of the numbers they are. A weight that is tied to an embedding is
    then in memory twice.
    """
    kept = find_read_weights(module)
    log_share_left(module, "weights are not packed")
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child not in kept:
                setattr(parent, name, PackedLinear(child))
