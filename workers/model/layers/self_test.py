"""Test of a model at load: the same tokens by transformers' own attention, and by blocks over slots.

In float32 the reference is one pass over all tokens, so that a model whose own blocks differ from the
whole is found as well. In other data types one number more or less decides about an expert, so there
it runs the same blocks, and the median token counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from workers.cache.caches import Caches
from workers.cache.layer_plan import LayerPlan
from workers.errors import ModelRefused
from workers.model.layers import attention
from workers.model.layers.kinds import refuse_running
from workers.model.layers.latent import expand_latents, keep_latents

_BLOCK = 32
_BLOCKS = 3
_STEPS = 8
# The largest difference of a logit, in standard deviations of all. Right models had 4e-3 at most in
# float32, and one whose states are lost between blocks 3.4.
_LIMIT = 0.1
# Of the median token, in other data types.
_MEDIAN_LIMIT = 0.5


class TestedModel(Protocol):
    """The parts of a loaded model that the test runs."""

    @property
    def module(self) -> PreTrainedModel:
        """The model, with kvrecall's attention."""

    @property
    def plan(self) -> LayerPlan:
        """What its layers keep."""

    def create_caches(self, slots: int, rows: int, room: int) -> Caches:
        """Allocate slots."""

    def cache_arguments(self, cache: object) -> dict[str, Any]:
        """Return the arguments that hand a cache to the model's `forward`."""


@dataclass(frozen=True)
class _Outputs:
    """Logits `[t, vocabulary]` and, where they were asked for, hidden states `[..., t, d]` by layer."""

    logits: Tensor
    hidden: tuple[Tensor, ...]

    @classmethod
    def join(cls, outputs: Iterable[Any]) -> "_Outputs":
        """Join the outputs of passes over consecutive tokens."""
        parts = list(outputs)
        states = [part.hidden_states or () for part in parts]
        return cls(
            torch.cat([part.logits[0] for part in parts]).float(),
            tuple(
                torch.cat(layer, -2).float()  # tokens are last but one, also of several streams
                for layer in zip(*states, strict=True)
            ),
        )


@torch.inference_mode()
def check_model(model: TestedModel) -> None:
    """Compare the model's logits with transformers' own. Raises ModelRefused where they differ."""
    try:
        difference, limit = _measure(model, hidden=False)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        raise refuse_running(model.module.config.model_type, model.plan, error) from error
    if difference <= limit:
        return
    raise ModelRefused(
        f"{model.module.config.model_type} is not computed as transformers computes it: a logit differs "
        f"by {difference:.2g} standard deviations, the limit is {limit}{_locate(model)}"
    )


def _measure(model: TestedModel, *, hidden: bool) -> tuple[float, float]:
    """Return the difference of the logits and its limit."""
    expected, found = _run_both(model, hidden=hidden)
    each = (expected.logits - found.logits).abs().amax(-1) / expected.logits.std()
    if model.module.dtype == torch.float32:
        return float(each.max()), _LIMIT
    return float(each.median()), _MEDIAN_LIMIT


def _locate(model: TestedModel) -> str:
    """Name the first layer whose output differs, as far as the model shows its layers' outputs."""
    expected, found = _run_both(model, hidden=True)
    for layer, (whole, ours) in enumerate(zip(expected.hidden[1:], found.hidden[1:], strict=True)):
        if float((whole - ours).abs().max() / whole.std()) > _LIMIT:
            return f"; the first layer that differs is {layer}, with {model.plan.describe(layer)}"
    return ""


def _run_both(model: TestedModel, *, hidden: bool) -> tuple[_Outputs, _Outputs]:
    """Run the tokens by transformers' attention and by ours."""
    tokens = _choose_tokens(model.module)
    exact = model.module.dtype == torch.float32
    blocks = _split(tokens, [len(tokens)] if exact else _lengths())
    return (
        _Outputs.join(_run_reference(model, blocks, hidden=hidden)),
        _Outputs.join(_run_ours(model, _split(tokens, _lengths()), hidden=hidden)),
    )


def _run_reference(model: TestedModel, blocks: Sequence[Tensor], *, hidden: bool) -> list[Any]:
    """Run blocks by transformers' own attention and cache; returns the outputs."""
    module = model.module
    cache = DynamicCache(config=module.config.get_text_config(decoder=True))
    expand_latents(module)
    module.set_attn_implementation("eager")
    try:
        return [
            _run(model, block, positions, cache, hidden=hidden)
            for block, positions in zip(blocks, _number(blocks), strict=True)
        ]
    finally:
        module.set_attn_implementation(attention.NAME)
        keep_latents(module)


def _run_ours(model: TestedModel, blocks: Sequence[Tensor], *, hidden: bool) -> list[Any]:
    """Run blocks over a slot, as sessions do; returns the outputs."""
    caches = model.create_caches(1, sum(map(len, blocks)), _BLOCK)
    slot = caches.active.claim(caches.active.rows)
    outputs = []
    for block, positions in zip(blocks, _number(blocks), strict=True):
        if caches.side is not None:
            caches.side.make_room(slot, int(positions[0]), len(block))
        step = caches.begin([slot], positions[None])
        with attention.run_pass(step):
            outputs.append(_run(model, block, positions, step, hidden=hidden))
        step.commit()
    return outputs


def _run(
    model: TestedModel, block: Tensor, positions: Tensor, cache: object, *, hidden: bool
) -> Any:
    device = model.module.device
    return model.module(
        input_ids=block[None].to(device),
        position_ids=positions[None].to(device),
        use_cache=True,
        output_hidden_states=hidden,
        **model.cache_arguments(cache),
    )


def _number(blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Number the tokens of consecutive blocks."""
    lengths = [len(block) for block in blocks]
    return torch.split(torch.arange(sum(lengths)), lengths)


def _choose_tokens(module: PreTrainedModel) -> Tensor:
    """Draw tokens that stand for text alone, int64 `[t]`."""
    config = module.config
    count = config.get_text_config(decoder=True).vocab_size
    marks = {
        value
        for each in (config.to_dict(), config.get_text_config(decoder=True).to_dict())
        for name, value in each.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    plain = torch.tensor([token for token in range(min(count, 4096)) if token not in marks])
    drawn = torch.randint(
        len(plain), (sum(_lengths()),), generator=torch.Generator().manual_seed(0)
    )
    return plain[drawn]


def _lengths() -> list[int]:
    return [_BLOCK] * _BLOCKS + [1] * _STEPS


def _split(tokens: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(torch.split(tokens, list(lengths)))
