"""Sizes read from a config are those of the model that is loaded."""

from pathlib import Path

import pytest
import torch

from kvrecall_server.app.wiring import page_layout
from reference import MODEL_PATH
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.model.architectures.wrappers import WRAPPERS
from workers.errors import ModelRefused
from workers.model.loader import adopt, load_model
from workers.model.sizes import measure_sizes, read_sizes

ALL = DENSE | LATENTS | RECURRENT | WINDOWED | WRAPPERS
SOME = ("qwen3", "deepseek_v3", "qwen3_next", "gemma2", "gpt_oss", next(iter(WRAPPERS)))


@pytest.mark.parametrize("name", SOME)
def test_no_weight_is_needed_for_the_sizes(name: str) -> None:
    module = build(ALL[name])
    measured = measure_sizes(module.config, torch.float32)
    loaded = adopt(module)
    assert (measured.plan, measured.shape) == (loaded.plan, loaded.shape)
    assert measured.layout.page_bytes == page_layout(loaded).page_bytes
    assert measured.state_bytes == loaded.state_bytes
    assert measured.get_side_bytes(64) == loaded.get_side_bytes(64)
    assert measured.weight_bytes == sum(each.nbytes for each in module.parameters())


def test_a_folder_has_its_own_data_type_unless_another_is_asked_for() -> None:
    own, half = read_sizes(MODEL_PATH), read_sizes(MODEL_PATH, torch.bfloat16)
    loaded = load_model(MODEL_PATH, device="cpu", dtype=own.dtype)
    assert own.weight_bytes == sum(each.nbytes for each in loaded.module.parameters())
    assert (half.dtype, half.layout.token_bytes * own.dtype.itemsize) == (
        torch.bfloat16,
        own.layout.token_bytes * 2,
    )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="config of"):
        read_sizes(tmp_path)
