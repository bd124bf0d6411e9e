"""A model type of transformers, with the settings of a tiny model of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """What a tiny model is built of.

    Attributes:
        kind: transformers' name of the model type.
        layers: Number of its layers.
        settings: Of its config, beside those of all tiny models.
        text: The language model inside, of a wrapper for images.
        seed: Of the weights: one with which the model does not say the same token again and again.
        refused: Pattern of the refusal's text, of a model that is not served.
    """

    kind: str
    layers: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: "Architecture | None" = None
    seed: int = 7
    refused: str = ""
