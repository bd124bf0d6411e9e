"""The layer profile: measured, kept in a file, refused for another model."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from workers.errors import ProfileRefused
from workers.model.layer_sensitivity import MIN_TOKENS, SINKS, Profile, load, measure, save
from workers.model.loader import LoadedModel, adopt
from workers.model.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def token_ids(tokenizer: ChatTokenizer, words: Callable[..., str]) -> list[int]:
    """A text of 320 tokens."""
    return tokenizer.encode(words(600))[:320]


@pytest.fixture(scope="module")
def profile(loaded: Callable[[str], LoadedModel], token_ids: list[int]) -> Profile:
    """The profile of a small Llama."""
    return measure(loaded("llama"), token_ids, name="small", text="words")


def _masked_keys(
    model: PreTrainedModel, token_ids: list[int], visible: torch.Tensor
) -> list[torch.Tensor]:
    """transformers' own keys per layer, `[n_kv_heads, n, head_dim]`, under a mask `[n, n]`."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        out = model(torch.tensor([token_ids]), attention_mask=mask[None, None], use_cache=True)
    return [layer.keys[0] for layer in out.past_key_values.layers]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sensitivity_is_one_minus_the_mean_cosine_of_the_keys_under_the_two_masks(
    family: str,
    loaded: Callable[[str], LoadedModel],
    plain: Callable[[str], PreTrainedModel],
    token_ids: list[int],
) -> None:
    found = measure(loaded(family), token_ids, name="small", text="words")
    indices = torch.arange(len(token_ids))
    causal = indices[None] <= indices[:, None]
    block_starts = indices // found.block * found.block
    # Rows before a block: all of them up to the budget; then sinks and the most recent.
    recent = indices[None] >= (block_starts - (found.budget - SINKS))[:, None]
    kept = (indices < SINKS)[None] | recent | (block_starts <= found.budget)[:, None]
    full = _masked_keys(plain(family), token_ids, causal)
    evicting = _masked_keys(plain(family), token_ids, causal & kept)
    counted = block_starts > found.budget
    assert found.compared == int(counted.sum())
    for layer, sensitivity in enumerate(found.sensitivity):
        cosine = torch.cosine_similarity(full[layer], evicting[layer], dim=-1)[:, counted].mean()
        assert sensitivity == pytest.approx(1 - float(cosine), abs=1e-4)


def test_the_first_layer_does_not_depend_on_attention_and_later_ones_do(profile: Profile) -> None:
    assert profile.sensitivity[0] == pytest.approx(0, abs=1e-6)
    assert profile.sensitivity[1] > 0.001


def test_the_same_text_gives_the_same_profile(
    profile: Profile, loaded: Callable[[str], LoadedModel], token_ids: list[int]
) -> None:
    assert measure(loaded("llama"), token_ids, name="small", text="words") == profile


def test_a_text_is_read_up_to_the_models_context(
    loaded: Callable[[str], LoadedModel], token_ids: list[int]
) -> None:
    model = loaded("llama")
    found = measure(model, token_ids * 10, name="small", text="words")
    assert found.tokens == model.max_context < len(token_ids) * 10
    assert (found.budget, found.block) == (model.max_context // 8, model.max_context // 16)


def test_a_text_that_is_too_short_is_refused(
    loaded: Callable[[str], LoadedModel], token_ids: list[int]
) -> None:
    with pytest.raises(ProfileRefused, match="127 tokens"):
        measure(loaded("llama"), token_ids[: MIN_TOKENS - 1], name="small", text="words")
    shortest = measure(loaded("llama"), token_ids[:MIN_TOKENS], name="small", text="words")
    assert shortest.compared == MIN_TOKENS - 3 * shortest.block


def test_a_model_whose_keys_overflow_is_refused(
    model_path: Callable[[str], Path], token_ids: list[int]
) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model_path("llama"), dtype=torch.float32)
    model = adopt(module)
    with torch.no_grad():
        module.model.layers[1].self_attn.k_proj.weight.fill_(math.inf)
    with pytest.raises(ProfileRefused, match="not finite"):
        measure(model, token_ids, name="broken", text="words")


def test_a_profile_survives_its_file(
    profile: Profile, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path = tmp_path / "profiles" / "one.json"
    save(profile, path)
    assert load(path, loaded("llama")) == profile
    assert [each.name for each in path.parent.iterdir()] == ["one.json"]


def test_another_models_profile_is_refused(
    profile: Profile, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    save(profile, tmp_path / "one.json")
    with pytest.raises(ProfileRefused, match="another model"):
        load(tmp_path / "one.json", loaded("qwen3"))
    shorter = profile.model_copy(update={"sensitivity": profile.sensitivity[:1]})
    save(shorter, tmp_path / "shorter.json")
    with pytest.raises(ProfileRefused, match="another model"):
        load(tmp_path / "shorter.json", loaded("llama"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sensitivity": [1]}', "\xff"])
def test_a_file_that_is_no_profile_is_refused(
    text: str, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ProfileRefused, match="no layer profile"):
        load(path, loaded("llama"))


@pytest.mark.parametrize("wrong", [-0.1, 2.5, math.nan, math.inf])
def test_a_sensitivity_outside_its_range_is_refused(
    wrong: float, profile: Profile, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    path.write_text(profile.model_copy(update={"sensitivity": (0.0, wrong)}).model_dump_json())
    with pytest.raises(ProfileRefused, match="no layer profile"):
        load(path, loaded("llama"))
