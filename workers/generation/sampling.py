"""Sampling of next tokens: one batch on the device for all sessions that decode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.messages import MAX_TOP_LOGPROBS, MIN_TEMPERATURE, Sampling
from workers.errors import BadSettings
from workers.generation.adjustment import Adjustment, adjust, send
from workers.generation.guide import Guide


def require_valid(sampling: Sampling, vocabulary: int) -> None:
    """Check sampling parameters from the wire. Raises BadSettings for one out of range.

    vocabulary: number of the model's tokens.
    """
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
    if not 0 <= sampling.min_p <= 1:
        raise BadSettings(f"min_p is {sampling.min_p}, it must be between 0 and 1")
    if not 0 < sampling.repetition_penalty <= 100:
        value = sampling.repetition_penalty
        raise BadSettings(f"repetition_penalty is {value}, it must be over 0 and at most 100")
    most = max(sampling.top_logprobs or 0, sampling.prompt_logprobs or 0)
    if most > MAX_TOP_LOGPROBS:
        raise BadSettings(f"{most} log-probabilities are asked for, at most {MAX_TOP_LOGPROBS}")
    numbers = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        *(bias for _, bias in sampling.logit_bias),
    )
    if not all(-100 <= number <= 100 for number in numbers):
        raise BadSettings("penalties and biases must be between -100 and 100")
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        unknown = [token for token in tokens if not 0 <= token < vocabulary]
        if unknown:
            raise BadSettings(f"{name} names token {unknown[0]}; the model has {vocabulary}")


@dataclass(frozen=True)
class Logprobs:
    """The log-probability of a sampled token, and the likeliest tokens in its place, by id."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """One session's sampling parameters and random numbers: one number per token, from its seed.

    The numbers are drawn on the CPU, so they are the same on every device and in every batch.

    Attributes:
        greedy: True if the likeliest token is always taken.
        temperature: Divisor of the logits.
        top_k: Number of likeliest tokens to sample among; 0 for all.
        top_p: Probability that the likeliest tokens to sample among must hold; 1 for all.
        min_p: Least share of the likeliest token's probability; 0 for all.
        top_logprobs: Number of likeliest tokens to report; None for no log-probabilities.
        logprobs: Those of the token that was sampled last.
        adjustment: Penalties and bias; None without.
        guide: What the answer is constrained to; None if it is free.
    """

    def __init__(
        self, sampling: Sampling, guide: Guide | None = None, ends: Sequence[int] = ()
    ) -> None:
        """Seed the random numbers; a temperature under MIN_TEMPERATURE is greedy.

        ends: tokens that end the answer.
        """
        self.greedy = sampling.temperature < MIN_TEMPERATURE
        self.temperature = sampling.temperature
        self.top_k = sampling.top_k
        self.top_p = sampling.top_p
        self.min_p = sampling.min_p
        self.top_logprobs = sampling.top_logprobs
        self.logprobs: Logprobs | None = None
        self.adjustment = Adjustment.of(sampling, ends)
        self.guide = guide
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._number: float | None = None

    def draw(self) -> float:
        """Return the number of the next token, uniform in [0, 1): the same until it is used."""
        if self._number is None:
            self._number = float(torch.rand((), dtype=torch.float64, generator=self._generator))
        return self._number

    def use(self) -> None:
        """Go on to the next number: a token was sampled by this one."""
        self._number = None

    def accept(self, token: int) -> None:
        """Go on by a token of the answer. Raises BadSettings where its grammar fails."""
        if self.adjustment is not None:
            self.adjustment.count(token)
        if self.guide is not None:
            self.guide.accept(token)

    def finish(self) -> None:
        """End the answer at an end token. Raises BadSettings where its grammar failed."""
        if self.guide is not None:
            self.guide.require_sound()


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Sample one token per row of float `[B, vocabulary]`, each by its own sampler.

    A row's token depends on its logits and its sampler alone, also after a call that failed. The
    device is waited for once, by the copy of the tokens, and again by that of log-probabilities, if
    some row reports them.
    """
    raw = logits
    logits = adjust(
        logits, [sampler.adjustment for sampler in samplers], [each.guide for each in samplers]
    )
    tokens = logits.argmax(-1)
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    if drawn:
        rows = send(drawn, torch.int64, logits.device)
        tokens[rows] = _draw(logits[rows], [samplers[row] for row in drawn])
    _report(raw, tokens, samplers)
    sampled: list[int] = tokens.tolist()
    for row in drawn:
        samplers[row].use()
    return sampled


def _report(logits: Tensor, tokens: Tensor, samplers: Sequence[Sampler]) -> None:
    """Give the samplers that report them the log-probabilities before any adjustment."""
    wanted = [row for row, sampler in enumerate(samplers) if sampler.top_logprobs is not None]
    if not wanted:
        return
    rows = send(wanted, torch.int64, logits.device)
    most = max(samplers[row].top_logprobs or 0 for row in wanted)
    found = measure(logits[rows], tokens[rows], most)
    for row, each in zip(wanted, found, strict=True):
        samplers[row].logprobs = Logprobs(each.logprob, each.top[: samplers[row].top_logprobs])


def measure(logits: Tensor, tokens: Tensor, most: int) -> list[Logprobs]:
    """Return the log-probability of a token in each row of `[B, vocabulary]`, and of the `most` likeliest.

    tokens: int64 `[B]`. The device is waited for once.
    """
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]))
    chosen = logprobs.gather(1, tokens[:, None])
    found = torch.cat([chosen, values, ids.to(values.dtype)], 1).tolist()
    half = values.shape[-1]
    return [
        Logprobs(logprob, tuple(zip(map(int, rest[half:]), rest[:half], strict=True)))
        for logprob, *rest in found
    ]


def _draw(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Sample by the inverse of the cumulative distribution: int64 `[B]`.

    In float64: the sum over a large vocabulary must not lose its unlikely tokens.
    """
    device = logits.device
    temperatures = [sampler.temperature for sampler in samplers]
    scaled = (logits - logits.amax(-1, keepdim=True)).double()
    scaled /= send(temperatures, torch.float64, device)[:, None]
    _keep_top_k(scaled, [sampler.top_k for sampler in samplers])
    _keep_top_p(scaled, [sampler.top_p for sampler in samplers])
    _keep_min_p(scaled, [sampler.min_p for sampler in samplers])
    cumulative = scaled.softmax(-1).cumsum(-1)
    cumulative /= cumulative[:, -1:].clone()
    numbers = send([sampler.draw() for sampler in samplers], torch.float64, device)
    # The first token whose cumulative probability is over the number: never one of probability 0.
    tokens = torch.searchsorted(cumulative, numbers[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)


def _keep_top_k(logits: Tensor, counts: Sequence[int]) -> None:
    """Exclude all but the `k` likeliest tokens of each row, and those as likely as the last."""
    limited = [(row, k) for row, k in enumerate(counts) if 0 < k < logits.shape[-1]]
    if not limited:
        return
    rows, ks = send(limited, torch.int64, logits.device).T
    values = logits[rows]
    best = values.topk(max(k for _, k in limited)).values
    least = best.gather(1, ks[:, None] - 1)
    logits[rows] = values.masked_fill(values < least, -torch.inf)


def _keep_top_p(logits: Tensor, shares: Sequence[float]) -> None:
    """Exclude all but the least number of likeliest tokens that hold the share `p` of each row."""
    limited = [(row, p) for row, p in enumerate(shares) if p < 1]
    if not limited:
        return
    rows = send([row for row, _ in limited], torch.int64, logits.device)
    ps = send([p for _, p in limited], torch.float64, logits.device)
    values, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    held = values.softmax(-1)
    before = held.cumsum(-1) - held
    values[before >= ps[:, None]] = -torch.inf
    logits[rows] = torch.empty_like(values).scatter_(1, order, values)


def _keep_min_p(logits: Tensor, shares: Sequence[float]) -> None:
    """Exclude tokens with less than a share of the likeliest one's probability in each row."""
    limited = [(row, math.log(share)) for row, share in enumerate(shares) if share > 0]
    if not limited:
        return
    rows = send([row for row, _ in limited], torch.int64, logits.device)
    least = send([share for _, share in limited], torch.float64, logits.device)
    values = logits[rows]
    floor = values.amax(-1, keepdim=True) + least[:, None]
    logits[rows] = values.masked_fill(values < floor, -torch.inf)
