"""Sampling of next tokens: one batch on the device for all sessions that decode."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvrecall.domain.messages import MIN_TEMPERATURE, Sampling
from workers.errors import BadSettings


def require_valid(sampling: Sampling) -> None:
    """Check sampling parameters from the wire. Raises BadSettings for one out of range."""
    if sampling.max_tokens < 1:
        raise BadSettings(f"max_tokens is {sampling.max_tokens}, it must be at least 1")
    if not 0 <= sampling.temperature <= 100:
        raise BadSettings(f"temperature is {sampling.temperature}, it must be between 0 and 100")
    if not 0 < sampling.top_p <= 1:
        raise BadSettings(f"top_p is {sampling.top_p}, it must be over 0 and at most 1")
    if sampling.top_k < 0:
        raise BadSettings(f"top_k is {sampling.top_k}, it must not be negative")
    if any(not text for text in sampling.stop):
        raise BadSettings("a stop string is empty: leave it out")


class Sampler:
    """One session's sampling parameters and random numbers: one number per token, from its seed.

    The numbers are drawn on the CPU, so they are the same on every device and in every batch.

    Attributes:
        greedy: True if the likeliest token is always taken.
        temperature: Divisor of the logits.
        top_k: Number of likeliest tokens to sample among; 0 for all.
        top_p: Probability that the likeliest tokens to sample among must hold; 1 for all.
    """

    def __init__(self, sampling: Sampling) -> None:
        """Seed the random numbers; a temperature under MIN_TEMPERATURE is greedy."""
        self.greedy = sampling.temperature < MIN_TEMPERATURE
        self.temperature = sampling.temperature
        self.top_k = sampling.top_k
        self.top_p = sampling.top_p
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def draw(self) -> float:
        """Draw the next number, uniform in [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Sample one token per row of float `[B, vocabulary]`, each by its own sampler.

    A row's token depends on its logits and its sampler alone. The device is waited for once, by
    the copy of the tokens.
    """
    tokens = logits.argmax(-1)
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    if drawn:
        rows = _send(drawn, torch.int64, logits.device)
        tokens[rows] = _draw(logits[rows], [samplers[row] for row in drawn])
    sampled: list[int] = tokens.tolist()
    return sampled


def _draw(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Sample by the inverse of the cumulative distribution: int64 `[B]`.

    In float64: the sum over a large vocabulary must not lose its unlikely tokens.
    """
    device = logits.device
    temperatures = [sampler.temperature for sampler in samplers]
    scaled = (logits - logits.amax(-1, keepdim=True)).double()
    scaled /= _send(temperatures, torch.float64, device)[:, None]
    _keep_top_k(scaled, [sampler.top_k for sampler in samplers])
    _keep_top_p(scaled, [sampler.top_p for sampler in samplers])
    cumulative = scaled.softmax(-1).cumsum(-1)
    cumulative /= cumulative[:, -1:].clone()
    numbers = _send([sampler.draw() for sampler in samplers], torch.float64, device)
    # The first token whose cumulative probability is over the number: never one of probability 0.
    tokens = torch.searchsorted(cumulative, numbers[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)


def _keep_top_k(logits: Tensor, counts: Sequence[int]) -> None:
    """Exclude all but the `k` likeliest tokens of each row, and those as likely as the last."""
    limited = [(row, k) for row, k in enumerate(counts) if 0 < k < logits.shape[-1]]
    if not limited:
        return
    rows, ks = _send(limited, torch.int64, logits.device).T
    values = logits[rows]
    best = values.topk(max(k for _, k in limited)).values
    least = best.gather(1, ks[:, None] - 1)
    logits[rows] = values.masked_fill(values < least, -torch.inf)


def _keep_top_p(logits: Tensor, shares: Sequence[float]) -> None:
    """Exclude all but the least number of likeliest tokens that hold the share `p` of each row."""
    limited = [(row, p) for row, p in enumerate(shares) if p < 1]
    if not limited:
        return
    rows = _send([row for row, _ in limited], torch.int64, logits.device)
    ps = _send([p for _, p in limited], torch.float64, logits.device)
    values, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    held = values.softmax(-1)
    before = held.cumsum(-1) - held
    values[before >= ps[:, None]] = -torch.inf
    logits[rows] = torch.empty_like(values).scatter_(1, order, values)


def _send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for the work that it has queued."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
