"""Models of several families on two ranks: those whose attention is divided, and those that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from reference import MODEL_PATH
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.full_attention import DENSE, MIXTURES
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.parallel.launched import run
from workers.errors import ModelRefused
from workers.model.sizes import read_sizes

SERVED = {
    "qwen3": DENSE["qwen3"],
    "gemma3": WINDOWED["gemma3_text"],
    "qwen3_next": RECURRENT["qwen3_next"],
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "gpt_oss": WINDOWED["gpt_oss"],
    "granitemoe": MIXTURES["granitemoe"],
    "hunyuan_v1_moe": MIXTURES["hunyuan_v1_moe"],
    "phimoe": MIXTURES["phimoe"],
}
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
REFUSED = {
    "experts": (
        replace(
            WINDOWED["gpt_oss"], settings={**WINDOWED["gpt_oss"].settings, "num_local_experts": 3}
        ),
        "3 experts, which 2 ranks cannot have equal numbers of",
    ),
    "deepseek_v3": (LATENTS["deepseek_v3"], "does not divide its attention"),
    "odd": (
        replace(DENSE["llama"], settings={**DENSE["llama"].settings, **ODD}),
        "3 KV heads, which 2 ranks cannot have equal parts of",
    ),
}


def save(architectures: dict[str, Architecture], folder: Path) -> Path:
    """Save tiny models in folders of their names."""
    for name, architecture in architectures.items():
        build(architecture).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder / name)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of all models."""
    refused = {name: architecture for name, (architecture, _) in REFUSED.items()}
    return save(SERVED | refused, tmp_path / "models")


def test_families_are_served_as_in_one_process_or_refused(models: Path, tmp_path: Path) -> None:
    cases = {name: ("families", models / name) for name in (*SERVED, *REFUSED)}
    alone, ranks = run(cases, tmp_path), run(cases, tmp_path, ranks=2)
    for name, (_, reason) in REFUSED.items():
        assert reason in ranks[name]["refused"]
        with pytest.raises(ModelRefused, match=reason):
            read_sizes(models / name, torch.float32, 2)
    for name in SERVED:
        part = ranks[name]["sizes"][0] / alone[name]["sizes"][0]
        assert part < 0.6, "a rank has its part of attention, experts and embeddings"
        for count, found in enumerate((alone[name], ranks[name]), 1):
            sizes = read_sizes(models / name, torch.float32, count)
            rows, windows = sizes.layout.token_bytes, sizes.get_side_bytes(64)
            assert found.pop("sizes") == [sizes.weight_bytes, rows, windows, sizes.state_bytes], (
                name
            )
        assert ranks[name] == alone[name], name
