"""Keys of the reference model after RoPE, and queries of tokens behind them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evals.harness import load
from reference.conversation import generate
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep

# Tokens behind the keys of which the queries are taken.
LATER = 256
_BLOCK = 512
# Tokens that are generated in addition, since a conversation's length is approximate.
_MORE = 4096


@dataclass(frozen=True, eq=False)
class KeySet:
    """Keys to index, and queries of tokens behind them.

    Attributes:
        keys: float32 `[n_layers, n_kv_heads, n, head_dim]`.
        queries: float32 `[n_layers, tokens, n_kv_heads, group, head_dim]`.
    """

    keys: Tensor
    queries: Tensor


@torch.inference_mode()
def reference_keys(rows: int, tokens: int, seed: int) -> KeySet:
    """Keys of `rows` tokens in layers 1 to 4; queries of `tokens` of the 256 tokens that follow.

    The first layer knows no context yet: its keys are those of the token ids.
    """
    loaded = load("reference")
    conversation = generate(seed, rows + LATER + _MORE, split="held_out")
    segments = loaded.tokenizer.prompt([], conversation.messages(), [], False)
    token_ids = [token for segment in segments for token in segment.token_ids]
    model, shape = loaded.model, loaded.model.shape
    length = rows + LATER
    bound = [length] * shape.n_layers
    cache = ActiveCache(shape, 1, bound, model.dtype, model.device)
    slot = cache.claim(bound)
    steps = []
    for first, last in [
        *((at, min(rows, at + _BLOCK)) for at in range(0, rows, _BLOCK)),
        (rows, length),
    ]:
        positions = torch.arange(first, last)[None]
        step = ForwardStep(cache, [slot], positions, observe=LATER if first == rows else 0)
        model.forward(torch.tensor(token_ids[first:last])[None], step)
        steps.append(step)
    layers = range(1, shape.n_layers)
    keys = [torch.cat([step.new_keys[each][0] for step in steps[:-1]], 1) for each in layers]
    asked = torch.linspace(0, LATER - 1, tokens).long()
    observed = torch.stack([steps[-1].observed[each][0, :, asked] for each in layers])
    grouped = observed.view(len(layers), shape.n_kv_heads, shape.group, tokens, shape.head_dim)
    return KeySet(torch.stack(keys).float(), grouped.permute(0, 3, 1, 2, 4).float())
