"""The attention function for transformers: attends to active rows only, and records queries."""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.cache.forward_step import ForwardStep
from workers.errors import ModelRefused

# The attention implementation's name in `AttentionInterface`. transformers builds no mask for it:
# visibility follows from the step's lengths.
NAME = "kvrecall"

# Features of attention that are refused, since they are not computed here.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Register `attn_implementation="kvrecall"` with transformers; may be called repeatedly.

    Takes cuDNN out of the kernels that torch chooses among, in this process: it plans each number
    of rows anew, tens of milliseconds for every token of an answer (docs/benchmarks.md).
    """
    AttentionInterface.register(NAME, active_attention)
    torch.backends.cuda.enable_cudnn_sdp(False)


def active_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    step: ForwardStep,
    **extras: object,
) -> tuple[Tensor, None]:
    """Attention of new tokens over the active rows of their slots.

    query: `[B, n_heads, t, head_dim]`; key, value: `[B, n_kv_heads, n, head_dim]`, as
    `ForwardStep.update` returned them. A query sees all rows from before the step, and the new rows
    that are not after its own: `ForwardStep.mask` hides the ends of shorter heads and the future
    alike. A step's block attention runs in its place where it returns anything; a step's retrieval
    adds rows that are not active. Returns `[B, t, n_heads, head_dim]`.

    Raises ModelRefused if the model requires more than that (a soft cap, learned sinks, a window):
    leaving it out would change the model's output.
    """
    if unsupported := [name for name in _UNSUPPORTED if extras.get(name) is not None]:
        raise ModelRefused(
            f"the model's attention requires {', '.join(unsupported)}, which kvrecall does not "
            "compute"
        )
    step.record(query)
    layer = cast("int", module.layer_idx)
    if step.block_attention is not None:
        out = step.block_attention.attend(layer, query, key, value, step.positions(layer), scaling)
        if out is not None:
            return out.transpose(1, 2), None
    batch, n_heads, tokens, head_dim = query.shape
    n_kv_heads = key.shape[1]
    # The query heads of a group become queries of their KV head, so that no row is repeated.
    grouped = query.reshape(batch, n_kv_heads, n_heads // n_kv_heads * tokens, head_dim)
    mask = step.mask(layer, query.dtype)
    if step.retrieval is None:
        out = nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, scale=scaling
        )
    else:
        rows = (key, value, step.positions(layer))
        out = step.retrieval.attend(layer, grouped, rows, mask, scaling)
    return out.reshape(batch, n_heads, tokens, head_dim).transpose(1, 2), None
