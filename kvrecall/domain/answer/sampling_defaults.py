"""Sampling parameters that a model recommends, for turns that name none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's sampling parameters, as in `Sampling`. The defaults of this class are greedy.

    Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": 0 <= self.temperature <= 2,
            "top_p": 0 < self.top_p <= 1,
            "top_k": 0 <= self.top_k < 2**31,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty <= 10,
        }
        for name in (name for name, within in allowed.items() if not within):
            raise ValueError(f"{name} {getattr(self, name)} is out of range")


GREEDY = SamplingDefaults()
