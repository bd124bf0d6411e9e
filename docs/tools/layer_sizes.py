"""Prints the table of docs/models.md: what layers keep, by the defaults of transformers' configs.

usage: python docs/tools/layer_sizes.py [MODEL_TYPE ...]

No weight is allocated: models are built on torch's meta device.
"""

import sys
from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvrecall.domain.worker_info import LayerKind
from workers.model.layers.kinds import read_plan
from workers.model.layers.report import describe_layers
from workers.model.layers.shape_probe import probe_shapes
from workers.model.loader import cache_argument

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
        state = sum(kind.state_bytes for kind in self.kinds)
        layers = ", ".join(f"{kind.layers} {kind.name}" for kind in self.kinds)
        states = f"{state / _MIB:,.1f} MiB" if state else "-"
        interval = f"{-(-state // tokens):,}" if state else "-"
        return f"| `{self.name}` | {layers} | {tokens / _KIB:,.1f} KiB | {states} | {interval} |"


@torch.inference_mode()
def measure(name: str) -> Sizes:
    """Measure a model type."""
    with torch.device("meta"):
        config = CONFIG_MAPPING[name]()
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    module.train(False)
    plan = read_plan(module.config.get_text_config(decoder=True))
    shape, side, _ = probe_shapes(module, plan, cache_argument(module))
    return Sizes(name, tuple(describe_layers(plan, shape, side, torch.bfloat16)))


def main() -> None:
    """Print the table."""
    print("| type | layers | stored for a token | a state | tokens with as many bytes |")
    print("| --- | --- | --- | --- | --- |")
    for name in sys.argv[1:] or FAMILIES:
        print(measure(name).to_row(), flush=True)


if __name__ == "__main__":
    main()
