"""Prints the table of docs/models.md: what layers keep, by the defaults of transformers' configs.

usage: python docs/tools/layer_sizes.py [MODEL_TYPE ...]

No weight is allocated.
"""

import sys
from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING

from kvrecall.domain.worker_info import LayerKind
from workers.model.layers.report import describe_layers
from workers.model.sizes import measure_sizes

FAMILIES = (
    "qwen3",
    "gpt_oss",
    "gemma3_text",
    "olmo3",
    "llama4_text",
    "deepseek_v3",
    "kimi_linear",
    "qwen3_next",
    "qwen3_5_text",
)
_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sizes:
    """One model type's layers, in bfloat16."""

    name: str
    kinds: tuple[LayerKind, ...]

    def to_row(self) -> str:
        """Write the type's row of the table."""
        tokens = sum(kind.token_bytes for kind in self.kinds)
        chosen = sum(kind.token_bytes for kind in self.kinds if "attention" in kind.name)
        state = sum(kind.state_bytes for kind in self.kinds)
        layers = ", ".join(f"{kind.layers} {kind.name}" for kind in self.kinds)
        states = f"{state / _MIB:,.1f} MiB" if state else "-"
        interval = f"{-(-state // tokens):,}" if state else "-"
        sizes = f"{tokens / _KIB:,.1f} KiB | {chosen / _KIB:,.1f} KiB"
        return f"| `{self.name}` | {layers} | {sizes} | {states} | {interval} |"


def measure(name: str) -> Sizes:
    """Measure a model type."""
    found = measure_sizes(CONFIG_MAPPING[name](), torch.bfloat16)
    return Sizes(name, tuple(describe_layers(found.plan, found.shape, found.side, found.dtype)))


def main() -> None:
    """Print the table."""
    print(
        "| type | layers | stored for a token | without windows | a state | tokens with as many bytes |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in sys.argv[1:] or FAMILIES:
        print(measure(name).to_row(), flush=True)


if __name__ == "__main__":
    main()
