"""The attention function for transformers: attends to active rows only, and records queries."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import isclose
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.cache.forward_step import ForwardStep
from workers.cache.logits import Logits, attend
from workers.errors import ModelRefused
from workers.model.layers.latent import absorb, expand, is_latent

# The attention implementation's name in `AttentionInterface`. transformers builds no mask for it:
# visibility follows from the step's lengths.
NAME = "kvrecall"

# Features of attention that are refused, since they are not computed here.
_UNSUPPORTED = ("position_bias", "head_mask", "indices")

_CURRENT: ContextVar[ForwardStep] = ContextVar("step")


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extras: object,
) -> tuple[Tensor, None]:
    """Attention of new tokens over the active rows of their slots, in the pass that `run_pass` runs.

    query: `[B, n_heads, t, head_dim]`; key, value: `[B, n_kv_heads, n, head_dim]`, as
    `ForwardStep.update` returned them. A query sees all rows from before the step, and the new rows
    that are not after its own, as far as its layer reaches: `ForwardStep.mask` hides the others and
    the ends of shorter heads. A step's block attention runs in its place where it returns anything; a
    step's retrieval adds rows that are not active. Returns `[B, t, n_heads, value_dim]`.

    Raises ModelRefused if the model requires more than scale, soft cap, sinks and windows: leaving it
    out would change the model's output.
    """
    if unsupported := [name for name in _UNSUPPORTED if extras.get(name) is not None]:
        raise ModelRefused(
            f"the model's attention requires {', '.join(unsupported)}, which kvrecall does not "
            "compute"
        )
    step = _CURRENT.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = is_latent(module)
    if latent:
        query = absorb(module, query)
    index = cast("int", module.layer_idx)
    out = _attend(step, index, query, key, value, Logits(scale, softcap, s_aux))
    if latent:
        out = expand(module, out)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def run_pass(step: ForwardStep) -> Iterator[None]:
    """Let `active_attention` serve a pass: not all models hand arguments on to their attention."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attend(
    step: ForwardStep, index: int, query: Tensor, key: Tensor, value: Tensor, logits: Logits
) -> Tensor:
    """Attend in the model's layer `index`; returns `[B, n_heads, t, value_dim]`."""
    part, layer = step.find(index)
    batch, n_heads, tokens, head_dim = query.shape
    n_kv_heads = key.shape[1]
    value_dim = part.cache.shape.value_dim
    if part.placement is not None:
        key = part.placement.turn(layer, key, part.positions(layer))
    managed = part is step
    if managed and step.owns_rows(index):
        step.record(rescale(query, logits.scale))
    # What reads stored rows runs on one device for all layers.
    if managed and step.block_attention is not None:
        found = step.block_attention.attend(
            layer,
            step.bring(query),
            step.bring(key),
            step.bring(value),
            step.bring(step.positions(layer)),
            _bring(step, logits),
        )
        if found is not None:
            return found[..., :value_dim].to(query.device)
    # The query heads of a group become queries of their KV head, so that no row is repeated.
    grouped = query.reshape(batch, n_kv_heads, n_heads // n_kv_heads * tokens, head_dim)
    mask = part.mask(layer, query.dtype)
    if managed and step.retrieval is not None:
        rows = (step.bring(key), step.bring(value), step.bring(step.positions(layer)))
        hidden = None if mask is None else step.bring(mask)
        asked = step.bring(grouped)
        out = step.retrieval.attend(layer, asked, rows, hidden, _bring(step, logits))
        out = out[..., :value_dim].to(query.device)
    else:
        out = attend(grouped, key, value[..., :value_dim], mask, logits)
    return out.reshape(batch, n_heads, tokens, -1)


def _bring(step: ForwardStep, logits: Logits) -> Logits:
    """Bring a layer's sinks to the device of work on all layers."""
    return logits if logits.sinks is None else replace(logits, sinks=step.bring(logits.sinks))


def rescale(query: Tensor, scale: float) -> Tensor:
    """Rescale queries so that `head_dim ** -0.5` gives the model's own logits."""
    factor = scale * query.shape[-1] ** 0.5
    return query if isclose(factor, 1.0, rel_tol=1e-6) else query * factor
