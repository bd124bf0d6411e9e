"""Multi-head latent attention in absorbed form: one row per token is the latent and the rotated key.

The query takes the up-projection of the keys, the output that of the values, so all query heads attend
to one row of `kv_lora_rank + qk_rope_head_dim` numbers, whose first `kv_lora_rank` are the value.

Source: DeepSeek-V2 (2024), section 2.1.2 and appendix B.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MARK = "kvrecall_latent"


def find_latent_layers(module: nn.Module) -> Iterator[Any]:
    """Find the attention modules that cache latents, by what transformers has them do."""
    for part in module.modules():
        if hasattr(part, "expand_kv") and hasattr(part, "kv_b_proj"):
            yield part


def find_read_weights(module: nn.Module) -> set[nn.Linear]:
    """Find the linear layers whose weights are read as such, so that none may be packed or quantized."""
    return {part.kv_b_proj for part in find_latent_layers(module)}


def keep_latents(module: nn.Module) -> None:
    """Let a model's layers attend to their latents, not to expanded keys."""
    for part in find_latent_layers(module):
        part.expand_kv = _pass_on
        setattr(part, _MARK, True)


def expand_latents(module: nn.Module) -> None:
    """Let a model's layers expand their latents again, as transformers does."""
    for part in find_latent_layers(module):
        part.__dict__.pop("expand_kv", None)
        part.__dict__.pop(_MARK, None)


def is_latent(layer: nn.Module) -> bool:
    """Check if a layer attends to latents."""
    return getattr(layer, _MARK, False)


def absorb(layer: Any, query: Tensor) -> Tensor:
    """Turn queries `[B, n_heads, t, nope + rope]` into `[B, n_heads, t, rank + rope]`."""
    nope = layer.qk_nope_head_dim
    up = layer.kv_b_proj.weight.view(query.shape[1], -1, layer.kv_lora_rank)[:, :nope]
    absorbed = torch.einsum("bhtd,hdr->bhtr", query[..., :nope], up)
    return torch.cat([absorbed, query[..., nope:]], -1)


def expand(layer: Any, out: Tensor) -> Tensor:
    """Turn weighted latents `[B, n_heads, t, rank]` into values `[B, n_heads, t, v_head_dim]`."""
    up = layer.kv_b_proj.weight.view(out.shape[1], -1, layer.kv_lora_rank)
    return torch.einsum("bhtr,hvr->bhtv", out, up[:, layer.qk_nope_head_dim :])


def _pass_on(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated
