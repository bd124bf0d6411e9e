"""Parts of the forward pass that can be left out, to show that a comparison notices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from workers.cache import state_pool
from workers.cache.logits import Logits, attend
from workers.cache.window import Window
from workers.model.layers import attention
from workers.model.layers.latent import absorb


def leave_out_sinks(patch: pytest.MonkeyPatch) -> None:
    """Attend without learned sinks."""
    _change_logits(patch, lambda query, logits: replace(logits, sinks=None))


def leave_out_soft_cap(patch: pytest.MonkeyPatch) -> None:
    """Attend without a bound on the logits."""
    _change_logits(patch, lambda query, logits: replace(logits, softcap=None))


def leave_out_scale(patch: pytest.MonkeyPatch) -> None:
    """Attend with the scale that most models have, instead of the model's own."""
    _change_logits(patch, lambda query, logits: replace(logits, scale=query.shape[-1] ** -0.5))


def halve_windows(patch: pytest.MonkeyPatch) -> None:
    """See half of every window or chunk."""
    first_seen = Window.first_seen

    def half(window: Window, position: Any) -> Any:
        return first_seen(replace(window, size=window.size // 2), position)

    patch.setattr(Window, "first_seen", half)


def forget_states(patch: pytest.MonkeyPatch) -> None:
    """Begin every pass without the states that the one before came to."""
    patch.setattr(state_pool, "_continue", lambda layer, which, tensor: None)


def leave_out_rotated_keys(patch: pytest.MonkeyPatch) -> None:
    """Attend to latents alone, without the part of their rows that has the position."""

    def without(layer: Any, query: Tensor) -> Tensor:
        absorbed = absorb(layer, query)
        absorbed[..., layer.kv_lora_rank :] = 0
        return absorbed

    patch.setattr(attention, "absorb", without)


def _change_logits(patch: pytest.MonkeyPatch, change: Callable[[Tensor, Logits], Logits]) -> None:
    def changed(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits
    ) -> Tensor:
        return attend(query, key, value, mask, change(query, logits))

    patch.setattr(attention, "attend", changed)
