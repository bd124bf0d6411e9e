"""Which models are served, and which are refused with the reason."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults
from kvrecall_server.app.models import check_model
from reference import MODEL_PATH
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused
from workers.model import loader
from workers.model.layers.kinds import read_plan
from workers.model.loader import (
    FALLBACK,
    LoadedModel,
    adopt,
    fingerprint,
    load_model,
)

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def _model(config: PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        (
            "Mistral",
            {"sliding_window": 4096},
            "only sliding_attention.*set sliding_window to null",
        ),
        ("Phi3", {"sliding_window": 2048}, "only sliding_attention"),
        ("Mamba", {}, "mamba"),
        ("RecurrentGemma", {}, "recurrent_gemma"),
        ("T5", {}, "encoder-decoder"),
        ("Bart", {}, "encoder-decoder"),
    ],
)
def test_a_model_without_rows_of_all_tokens_is_refused(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    config = getattr(transformers, f"{family}Config")(**settings)
    with pytest.raises(ModelRefused, match=reason):
        read_plan(config)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        MistralConfig(sliding_window=None, **SMALL),
        Qwen2Config(sliding_window=32, use_sliding_window=False, **SMALL),
        transformers.Qwen3Config(head_dim=24, **SMALL),
        transformers.Phi3Config(sliding_window=None, pad_token_id=0, **SMALL),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.filterwarnings("error::FutureWarning")
def test_full_attention_is_served(config: PreTrainedConfig) -> None:
    model = adopt(_model(config))
    head_dim = getattr(config, "head_dim", None) or 8
    assert model.shape == KVShape(n_layers=2, n_heads=2, n_kv_heads=1, head_dim=head_dim)
    assert model.side is None
    assert model.max_context == 64


def test_a_model_is_served_whichever_name_it_gives_its_cache() -> None:
    arguments = inspect.signature(LlamaForCausalLM.forward).parameters
    own = "cache" if "cache" in arguments else "past_key_values"

    class Older(LlamaForCausalLM):
        def forward(self, past_key_values: ForwardStep | None = None, **others: Any) -> Any:
            return super().forward(**{own: past_key_values}, **others)

    class Newer(LlamaForCausalLM):
        def forward(self, cache: ForwardStep | None = None, **others: Any) -> Any:
            return super().forward(**{own: cache}, **others)

    for family in (Older, Newer):
        assert adopt(family(LlamaConfig(**SMALL))).shape.n_layers == 2


def test_a_directory_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    MistralConfig(sliding_window=8, architectures=["MistralForCausalLM"], **SMALL).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelRefused, match="only sliding_attention"):
        load_model(tmp_path)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="could not be loaded"):
        load_model(tmp_path / "nothing")
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="could not be loaded"):
        load_model(tmp_path)


class Evil:
    """A weight that leaves a mark where it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("evil", [False, True])
def test_weights_in_a_pickle_are_refused_before_anything_is_loaded(
    evil: bool, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path("llama"), folder)
    weights: Any = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "read"
    torch.save({"model.norm.weight": Evil(mark)} if evil else weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"pytorch_model.bin, are a pickle.*save_pretrained"):
        load_model(folder)
    with pytest.raises(ModelRefused, match=r"pytorch_model.bin, are a pickle.*save_pretrained"):
        check_model(str(folder))
    assert not mark.exists()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load_model(folder).fingerprint == load_model(model_path("llama")).fingerprint
    assert not mark.exists()


def test_a_model_that_goes_past_the_attention_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(ModelRefused):
        adopt(_model(config))


def test_rows_are_counted_in_bytes_of_the_models_dtype() -> None:
    config = LlamaConfig(
        **{**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    )
    shape = adopt(_model(config)).shape
    assert shape == KVShape(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6)
    assert shape.group == 2
    assert shape.row_bytes(torch.bfloat16) == 24


def test_the_fingerprint_is_the_same_at_every_load(
    loaded: Callable[[str], LoadedModel], model_path: Callable[[str], Path]
) -> None:
    assert load_model(model_path("llama")).fingerprint == loaded("llama").fingerprint


def test_other_weights_another_dtype_or_other_positions_give_another_fingerprint() -> None:
    config = LlamaConfig(**SMALL)
    prints = {
        fingerprint(_model(config)),
        fingerprint(_model(config, seed=1)),
        fingerprint(_model(config).bfloat16()),
    }
    turned = _model(config)
    turned.model.layers[1].self_attn.k_proj.weight.data[3, 5] += 1e-3
    prints.add(fingerprint(turned))
    far = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SMALL)
    prints.add(fingerprint(_model(far)))
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, FALLBACK),
        ({"do_sample": True}, FALLBACK),
        ({"do_sample": False}, GREEDY),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.6, top_p=0.9)),
        ({"top_k": 64, "repetition_penalty": 1.05}, SamplingDefaults(1.0, 1.0, 64, 0.0, 1.05)),
    ],
)
def test_sampling_comes_from_the_generation_config(
    named: dict[str, Any], expected: SamplingDefaults
) -> None:
    module = _model(LlamaConfig(**SMALL))
    module.generation_config.update(**named)
    assert adopt(module).sampling == expected


def test_a_generation_config_that_cannot_be_sampled_by_is_refused() -> None:
    module = _model(LlamaConfig(**SMALL))
    module.generation_config.update(top_p=1.5)
    with pytest.raises(ModelRefused, match=r"llama's generation_config: top_p 1\.5"):
        adopt(module)


@pytest.mark.parametrize(("eos", "expected"), [(3, (3,)), ([3, 4], (3, 4)), (None, ())])
def test_end_tokens_come_from_the_generation_config(
    eos: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    module = _model(LlamaConfig(**SMALL, eos_token_id=None))
    module.generation_config.eos_token_id = eos
    assert adopt(module).eos_token_ids == expected


@pytest.mark.parametrize("has_instructions", [True, False])
def test_bfloat16_is_float32_on_a_cpu_that_would_emulate_it(
    has_instructions: bool,
    model_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = load_model(model_path("llama"), dtype=torch.bfloat16, pack=False)
    original.module.save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: has_instructions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = torch.bfloat16 if has_instructions else torch.float32
    assert load_model(tmp_path).dtype == expected
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_model(tmp_path, device="cpu").dtype == torch.bfloat16


def test_half_precision_is_served_as_it_is(model_path: Callable[[str], Path]) -> None:
    model = load_model(model_path("llama"), dtype=torch.bfloat16)
    cache = ActiveCache(model.shape, 1, [8, 8], model.dtype)
    step = ForwardStep(cache, [cache.claim([8, 8])], torch.arange(5)[None])
    logits = model.forward(torch.arange(5)[None], step, logits_to_keep=2)
    assert model.dtype == step.rows.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 2, 1280)


def test_a_model_is_not_divided_between_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelRefused, match="this machine has none"):
        load_model(MODEL_PATH, divide=True)
