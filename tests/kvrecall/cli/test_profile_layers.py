"""`kvrecall profile-layers`, and the profile that a worker finds or measures when it starts."""

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvrecall.app.calibration import known_profile, packaged_text, profile_path, read_text
from kvrecall.app.errors import BadCalibrationText
from kvrecall.app.wiring import build_worker_service
from kvrecall.cli.profile_layers import profile_layers_command
from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from workers.engine.settings import WorkerSettings
from workers.errors import ProfileRefused
from workers.model import layer_sensitivity as profile
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.primitives.budgets import split_budget


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The reference model."""
    return load_model(MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> ChatTokenizer:
    """Its tokenizer."""
    return load_tokenizer(MODEL_PATH, model.eos_token_ids)


def test_the_command_measures_saves_and_shows(
    command: Callable[..., Any], model: LoadedModel, tmp_path: Path
) -> None:
    found = command("profile-layers", "--data", tmp_path, "--tokens", "512", "--budget", "100")
    assert found.exit_code == 0, found.output
    path = profile_path(tmp_path, model)
    kept = profile.load(path, model)
    assert kept.tokens == 512
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.name in found.output
    lines = re.findall(r"^ +(\d+) +([\d.]+) +(\d+) +(\d+) +(\d+) *$", found.output, re.MULTILINE)
    assert [line[1] for line in lines] == [f"{each:.4f}" for each in kept.sensitivity]
    for column in (2, 3, 4):
        assert sum(int(line[column]) for line in lines) == 100 * model.shape.n_layers


def test_an_operators_text_is_read(
    command: Callable[..., Any], model: LoadedModel, tmp_path: Path
) -> None:
    own = tmp_path / "talk.txt"
    own.write_text("Please note that the badge list says Melnor K4821.\n\nNoted.\n\n" * 20)
    found = command("profile-layers", "--data", tmp_path, "--text", own)
    assert found.exit_code == 0, found.output
    assert profile.load(profile_path(tmp_path, model), model).text == "talk.txt"


@pytest.mark.parametrize("content", [b"", b" \n\n ", b"too short", b"\xff\xfe"])
def test_an_unusable_text_is_refused_in_a_line(
    command: Callable[..., Any], tmp_path: Path, content: bytes
) -> None:
    own = tmp_path / "talk.txt"
    own.write_bytes(content)
    found = command("profile-layers", "--data", tmp_path, "--text", own)
    assert found.exit_code == 2
    assert "Traceback" not in found.output
    assert "talk.txt" in found.output
    assert not (tmp_path / "profiles").exists()


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCalibrationText, match=r"none\.txt"):
        read_text(tmp_path / "none.txt")


def test_the_command_measures_on_as_many_tokens_as_a_worker() -> None:
    assert signature(profile_layers_command).parameters["tokens"].default == profile.TOKENS


def test_the_packaged_texts_are_long_enough_and_alternate(tokenizer: ChatTokenizer) -> None:
    for name in (str(MODEL_PATH), "some/other-model"):
        messages = packaged_text(name).messages
        token_ids = [
            token for part in tokenizer.prompt([], messages, [], False) for token in part.token_ids
        ]
        assert len(token_ids) >= profile.TOKENS
    english = packaged_text("some/other-model").messages
    assert [message["role"] for message in english] == ["user", "assistant"] * (len(english) // 2)


def test_another_models_profile_is_measured_on_english(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    found = known_profile(model, tokenizer, tmp_path, "some/other-model")
    assert found is not None
    assert (found.model, found.text) == ("some/other-model", "calibration.txt")


def test_a_profile_is_measured_once_and_then_found(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    with capture_logs() as first:
        measured = known_profile(model, tokenizer, tmp_path, str(MODEL_PATH))
    with capture_logs() as second:
        found = known_profile(model, tokenizer, tmp_path, str(MODEL_PATH))
    assert found == measured
    assert [line["event"] for line in first][-1] == "layer profile saved"
    assert not second
    assert measured is not None
    assert measured.model == "the reference model"


def test_a_profile_of_another_model_prevents_the_start(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    kept = profile.measure(model, list(range(200)), name="kept", text="numbers")
    profile.save(kept.model_copy(update={"fingerprint": "another"}), profile_path(tmp_path, model))
    with pytest.raises(ProfileRefused, match="delete it"):
        known_profile(model, tokenizer, tmp_path, str(MODEL_PATH))


async def test_a_worker_splits_budgets_by_its_models_profile(
    model: LoadedModel, tmp_path: Path
) -> None:
    kept = profile.measure(model, list(range(200)), name="kept", text="numbers")
    kept = kept.model_copy(update={"sensitivity": (0.0, 0.3, 0.1, 0.1, 0.2)})
    profile.save(kept, profile_path(tmp_path, model))
    settings = WorkerSettings(slots=1, max_budget=128, block_tokens=32)
    calls = build_worker_service(MODEL_PATH, tmp_path, settings, ram_bytes=1 << 20)
    try:
        spec = pb.SessionSpec(
            session="s", epoch=1, method="knorm", budget=128, layer_budgets="sensitivity"
        )
        memory = await calls.open(pb.OpenRequest(spec=spec))
    finally:
        await calls.close()
    rows = split_budget(128, 5, "sensitivity", floor=settings.min_budget, weights=kept.sensitivity)
    assert [bound - memory.bound_rows[0] for bound in memory.bound_rows] == [
        each - rows[0] for each in rows
    ]


def test_a_context_too_short_to_measure_in_gives_no_profile(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from workers.model.loader import adopt

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1280,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    assert known_profile(adopt(LlamaForCausalLM(config)), tokenizer, tmp_path, "short") is None
    assert not (tmp_path / "profiles").exists()
