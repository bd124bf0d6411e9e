"""Test of native decode steps at load: the same logits and rows as torch's.

Of sessions of unequal lengths, one of which ends at the model's last positions: there are models that
scale queries, or change frequencies, by the position. In data types whose rounding would hide such differences,
the model's structure is tested in float32.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.cache.caches import Caches
from workers.cache.forward_step import ForwardStep
from workers.cache.layer_plan import LayerPlan
from workers.cache.slot_pool import KVShape
from workers.model.decoding.widened import widen

# Tokens before the steps of each session.
_LENGTHS = (24, 7)
_STEPS = 4
# The largest difference of a logit or of a row's number, in standard deviations of all. Right models had 1e-4 at
# most in float32.
_LIMIT = 2e-3
# Of the median token, in other data types: torch rounds what is computed here in float32.
_MEDIAN_LIMIT = 0.5


class TestedModel(Protocol):
    """The parts of a loaded model that steps are computed of, and compared with."""

    @property
    def module(self) -> PreTrainedModel:
        """The model, with kvrecall's attention."""

    @property
    def plan(self) -> LayerPlan:
        """What its layers keep."""

    @property
    def shape(self) -> KVShape:
        """Shape of its rows."""

    @property
    def max_context(self) -> int:
        """Maximum number of positions."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a logit."""

    def create_caches(self, slots: int, rows: int, room: int, dtype: torch.dtype) -> Caches:
        """Allocate slots."""

    def forward(self, token_ids: Tensor, step: ForwardStep, logits_to_keep: int = 1) -> Tensor:
        """Run tokens at the step's positions."""


@torch.inference_mode()
def check_steps(model: TestedModel, forward: Callable[[Tensor, ForwardStep], Tensor]) -> str | None:
    """Compare steps of `forward` with the model's own; returns how they differ, None if they do not."""
    dtype = model.module.dtype
    return _compare(*_run(model, forward, dtype), exact=dtype == torch.float32)


@torch.inference_mode()
def check_structure(
    model: TestedModel, forward: Callable[[Tensor, ForwardStep], Tensor]
) -> str | None:
    """Compare steps in float32, as `check_steps`; `forward` has weights that are not quantized."""
    with widen(model.module):
        return _compare(*_run(model, forward, torch.float32), exact=True)


def _compare(
    expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], *, exact: bool
) -> str | None:
    for what, wanted, own in zip(("logit", "row's number"), expected, found, strict=True):
        each = (own - wanted).abs().amax(-1) / wanted.std()
        difference, limit = (each.max(), _LIMIT) if exact else (each.median(), _MEDIAN_LIMIT)
        if not float(difference) <= limit:
            return (
                f"a {what} differs from torch's by {float(difference):.2g} standard deviations, the limit "
                f"is {limit}"
            )
    return None


def _run(
    model: TestedModel, forward: Callable[[Tensor, ForwardStep], Tensor], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Run steps after prompts by torch, over rows of a data type: the model's own, then those of `forward`.

    Returns logits and rows of each, float32 `[t, n]`.
    """
    random = torch.Generator().manual_seed(0)
    caches = model.create_caches(len(_LENGTHS), max(_LENGTHS) + _STEPS, max(_LENGTHS), dtype)
    active = caches.active
    slots = [active.claim(active.rows) for _ in _LENGTHS]
    for slot, length in zip(slots, _LENGTHS, strict=True):
        prompt = torch.randint(model.vocabulary, (1, length), generator=random)
        step = caches.begin([slot], torch.arange(length)[None])
        model.forward(prompt, step)
        step.commit()
    tokens = torch.randint(model.vocabulary, (_STEPS, len(slots), 1), generator=random)
    begun = [active.copy(slot) for slot in slots]
    expected = _take_steps(model, model.forward, caches, slots, tokens)
    for slot in slots:
        active.release(slot)
    again = [active.put_back(each) for each in begun]
    return expected, _take_steps(model, forward, caches, again, tokens)


def _take_steps(
    model: TestedModel,
    forward: Callable[[Tensor, ForwardStep], Tensor],
    caches: Caches,
    slots: Sequence[int],
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    logits, rows = [], []
    positions = torch.tensor([_LENGTHS[0], max(_LENGTHS[1], model.max_context - _STEPS)])[:, None]
    for number, each in enumerate(tokens):
        step = caches.begin(slots, positions + number)
        logits.append(forward(each, step)[:, 0])
        step.commit()
        rows.append(step.rows.flatten(1).float())
    return torch.cat(logits), torch.cat(rows)
