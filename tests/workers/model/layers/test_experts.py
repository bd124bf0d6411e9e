"""Experts are computed by grouped products where transformers allows it, and the log says where not."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedModel

from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.full_attention import DENSE, MIXTURES
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.served import SERVED
from workers.model.layers.experts import GROUPED, choose_experts
from workers.model.loader import load_model

OWN_CODE = {
    "llama4_text": "Llama4TextExperts, not grouped_mm: Llama4TextModel does not support",
    "llama4-wrapper": "Llama4TextExperts, not grouped_mm: Llama4TextModel does not support",
    "longcat_flash": "LongcatFlashExperts, not grouped_mm: LongcatFlashModel does not support",
}
"""Mixtures whose experts transformers does not dispatch, and how their lines in the log begin."""


def choose(model: PreTrainedModel) -> list[str]:
    """Choose what computes a model's experts; returns what the log says about them."""
    with capture_logs() as logs:
        choose_experts(model)
    return [log["runs"] for log in logs if log["event"] == "experts"]


def run_blocks(model: PreTrainedModel) -> None:
    """Run each block of router and experts over three tokens without values: shapes alone.

    Raises DynamicOutputShapeException where a shape depends on a number, which waits for the device.
    """
    blocks = [
        model.get_submodule(name.rpartition(".")[0])
        for name, _ in model.named_modules()
        if name.endswith(".experts")
    ]
    assert blocks
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        for block in blocks:
            block(torch.zeros(1, 3, 64, dtype=model.dtype))


@pytest.mark.parametrize("name", list(SERVED))
def test_what_computes_the_experts_of_each_mixture_is_in_the_log(name: str) -> None:
    """Once, and nothing is said of models without experts."""
    model = build(SERVED[name])
    said = choose(model)
    if not any(".experts." in each for each, _ in model.named_parameters()):
        assert said == []
    elif name in OWN_CODE:
        assert [line.startswith(OWN_CODE[name]) for line in said] == [True]
    else:
        assert said == [GROUPED]


@pytest.mark.parametrize("name", [each for each in SERVED if each not in OWN_CODE])
def test_experts_that_are_grouped_never_wait_for_a_number(name: str) -> None:
    model = build(SERVED[name]).bfloat16()
    if choose(model):
        run_blocks(model)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_in_a_loop_wait_for_a_number(name: str) -> None:
    """So the test above can fail."""
    model = build((MIXTURES | LATENTS)[name]).bfloat16()
    model.set_experts_implementation("eager")
    with pytest.raises(DynamicOutputShapeException):
        run_blocks(model)


def test_a_checkpoint_that_asks_for_a_loop_gets_grouped_products(tmp_path: Path) -> None:
    model = build(MIXTURES["mixtral"])
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"experts_implementation": "eager",', 1))
    assert model.config.from_pretrained(tmp_path)._experts_implementation == "eager"
    with capture_logs() as logs:
        loaded = load_model(tmp_path, device="cpu")
    assert [log["runs"] for log in logs if log["event"] == "experts"] == [GROUPED]
    assert loaded.module.config._experts_implementation == GROUPED


def test_a_dense_model_is_loaded_without_a_word_about_experts(tmp_path: Path) -> None:
    build(DENSE["llama"]).save_pretrained(tmp_path)
    with capture_logs() as logs:
        load_model(tmp_path, device="cpu")
    assert not [log for log in logs if log["event"] == "experts"]
