"""Adjustment of logits before sampling: penalties, bias and constraints, for a batch of sessions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrecall.domain.messages import Sampling
from workers.generation.guide import Guide

# Finite: a token that ends the answer still comes where a grammar allows nothing else.
_NEVER = -1e9


class Adjustment:
    """One session's penalties and bias, and how often its answer has each token.

    The counts begin with the turn: tokens of the prompt, which may be forgotten, do not count.
    """

    def __init__(self, sampling: Sampling, ends: Sequence[int] = ()) -> None:
        """Begin without a token. ends: tokens that end the answer."""
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self.repetition = sampling.repetition_penalty
        self._bias = dict(sampling.logit_bias)
        self._min_tokens = sampling.min_tokens
        self._ends = tuple(ends)
        self._tokens = 0
        self._new: list[int] = []
        self._counts: Tensor | None = None
        self._added: Tensor | None = None

    @classmethod
    def of(cls, sampling: Sampling, ends: Sequence[int] = ()) -> "Adjustment | None":
        """Return the adjustment that a turn asks for; None if it asks for none."""
        none = Sampling()
        same = all(
            getattr(sampling, name) == getattr(none, name)
            for name in (
                "frequency_penalty",
                "presence_penalty",
                "repetition_penalty",
                "logit_bias",
                "min_tokens",
            )
        )
        return None if same else cls(sampling, ends)

    def count(self, token: int) -> None:
        """Count a token of the answer."""
        self._new.append(token)
        self._tokens += 1
        if self._tokens == self._min_tokens:
            self._added = None

    def counts(self, like: Tensor) -> Tensor:
        """How often each token was generated: as a row `like`, on its device."""
        if self._counts is None:
            self._counts = torch.zeros_like(like)
        if self._new:
            ids = send(self._new, torch.int64, like.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=like.dtype))
            self._new = []
        return self._counts

    def bias(self, like: Tensor) -> Tensor:
        """What is added to each token's logit: as a row `like`, on its device."""
        if self._added is None:
            self._added = torch.zeros_like(like)
            if self._tokens < self._min_tokens:
                ids = send(self._ends, torch.int64, like.device)
                self._added[ids] = _NEVER
            if self._bias:
                ids = send(list(self._bias), torch.int64, like.device)
                self._added[ids] += send(list(self._bias.values()), like.dtype, like.device)
        return self._added


def adjust(
    logits: Tensor, adjustments: Sequence[Adjustment | None], guides: Sequence[Guide | None]
) -> Tensor:
    """Adjust logits, float32 `[B, vocabulary]`, row by row.

    Returns a copy where anything is to be done, else the logits themselves.
    """
    penalized = [(row, each) for row, each in enumerate(adjustments) if each is not None]
    guided = [(row, each) for row, each in enumerate(guides) if each is not None and each.active]
    if not penalized and not guided:
        return logits
    logits = logits.clone()
    if penalized:
        rows = send([row for row, _ in penalized], torch.int64, logits.device)
        logits[rows] = _penalize(logits[rows], [each for _, each in penalized])
    if guided:
        rows = send([row for row, _ in guided], torch.int64, logits.device)
        allowed = _get_allowed(logits, [each for _, each in guided])
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits


def _penalize(logits: Tensor, adjustments: Sequence[Adjustment]) -> Tensor:
    """Apply penalties, then bias, to float `[B, vocabulary]`."""
    counts = torch.stack([each.counts(logits[0]) for each in adjustments])
    factors = [[each.repetition, each.frequency, each.presence] for each in adjustments]
    repetition, frequency, presence = send(factors, logits.dtype, logits.device).T[..., None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    logits = logits - frequency * counts - presence * (counts > 0)
    return logits + torch.stack([each.bias(logits[0]) for each in adjustments])


def _get_allowed(logits: Tensor, guides: Sequence[Guide]) -> Tensor:
    """Which tokens may come next: bool `[len(guides), vocabulary]`, on the device of the logits.

    The bits are computed while the device is at work, and unpacked there.
    """
    vocabulary = logits.shape[-1]
    bits = np.zeros((len(guides), -(-vocabulary // 32)), np.int32)
    for row, guide in zip(bits, guides, strict=True):
        guide.fill(row)
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> places) & 1
    return allowed.bool().flatten(1)[:, :vocabulary]


def send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for the work that it has queued."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
