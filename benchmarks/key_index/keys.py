"""Keys after RoPE and later queries, of the reference model, of SmolLM2, and made up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.repair_keys import SyntheticKeys
from evals.harness import load
from evals.recordings import list_recordings, read_recording
from reference.conversation import generate
from workers.cache.active_cache import ActiveCache, KVShape
from workers.cache.forward_step import ForwardStep
from workers.model.loader import LoadedModel

# Tokens behind the keys of which the queries are taken.
LATER = 256
_BLOCK = 512
# Five of SmolLM2's 30 layers.
SOME_SMOLLM2_LAYERS = (2, 8, 15, 22, 28)
# Tokens that are generated in addition, since a conversation's length is approximate.
_MORE = 4096


@dataclass(frozen=True, eq=False)
class KeySet:
    """Keys to index, and queries of tokens behind them.

    Attributes:
        name: Whose they are.
        keys: float32 `[n_layers, n_kv_heads, n, head_dim]`.
        queries: float32 `[n_layers, tokens, n_kv_heads, group, head_dim]`.
    """

    name: str
    keys: Tensor
    queries: Tensor

    @property
    def rows(self) -> int:
        """Rows per layer and head."""
        return self.keys.shape[2]


def reference_keys(rows: int, tokens: int, seed: int) -> KeySet:
    """The reference model's on a generated conversation, layers 1 to 4, queries of `tokens` tokens.

    The first layer knows no context yet: its keys are those of the token ids.
    """
    loaded = load("reference")
    conversation = generate(seed, rows + LATER + _MORE, split="held_out")
    segments = loaded.tokenizer.prompt([], conversation.messages(), [], False)
    token_ids = [token for segment in segments for token in segment.token_ids]
    layers = range(1, loaded.model.shape.n_layers)
    return capture("reference", loaded.model, token_ids, rows, tokens, layers)


def smollm2_keys(
    data: Path, rows: int, tokens: int, layers: Sequence[int] | None = SOME_SMOLLM2_LAYERS
) -> KeySet:
    """SmolLM2's on the text of the first recording of `data`; layers: None for all but the first."""
    loaded = load("smollm2")
    messages = read_recording(list_recordings(data)[0]).messages
    token_ids = loaded.tokenizer.encode("\n".join(str(each["content"]) for each in messages))
    layers = layers or range(1, loaded.model.shape.n_layers)
    return capture("smollm2", loaded.model, token_ids, rows, tokens, layers)


def made_up_keys(rows: int, tokens: int, seed: int) -> KeySet:
    """One layer with a model's statistics, see `SyntheticKeys`."""
    made = SyntheticKeys(KVShape(1, 4, 2, 64), torch.float32, seed, tokens)
    queries = made.observed.queries[0].view(1, 2, 2, tokens, 64)
    return KeySet(made.name, torch.cat(list(made.keys(rows)), 2), queries.permute(0, 3, 1, 2, 4))


@torch.inference_mode()
def capture(
    name: str,
    model: LoadedModel,
    token_ids: Sequence[int],
    rows: int,
    tokens: int,
    layers: Sequence[int],
) -> KeySet:
    """Run `rows` tokens, then 256 more, `tokens` of which, at equal distances, give the queries."""
    length = rows + LATER
    if len(token_ids) < length:
        raise SystemExit(f"the text has {len(token_ids)} tokens; it needs {length} for {rows} rows")
    shape = model.shape
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
    keys = [torch.cat([step.new_keys[each][0] for step in steps[:-1]], 1) for each in layers]
    asked = torch.linspace(0, LATER - 1, tokens).long()
    observed = torch.stack([steps[-1].observed[each][0, :, asked] for each in layers])
    grouped = observed.view(len(layers), shape.n_kv_heads, shape.group, tokens, shape.head_dim)
    queries = grouped.permute(0, 3, 1, 2, 4)
    return KeySet(name, torch.stack(keys).float(), queries.float())
