"""The layer profile: measured when it is first needed, kept in the data and cache directories."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.calibration import (
    find_profile,
    measure_once,
    packaged_text,
    profile_path,
    read_text,
)
from kvrecall_server.app.errors import BadCalibrationText
from kvrecall_server.app.models import REFERENCE
from kvrecall_server.app.wiring import build_worker_service
from reference import MODEL_PATH
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings, ProfileRefused
from workers.model import layer_sensitivity as profile
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.primitives.budgets import split_budget

SETTINGS = WorkerSettings(slots=1, max_budget=128, block_tokens=32)
BY_SENSITIVITY = pb.SessionSpec(
    session="s", epoch=1, method="knorm", budget=128, layer_budgets="sensitivity"
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The reference model."""
    return load_model(MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> ChatTokenizer:
    """Its tokenizer."""
    return load_tokenizer(MODEL_PATH, model.eos_token_ids)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("KVRECALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(steps: Generator[None, Any, tuple[float, ...]]) -> tuple[int, tuple[float, ...]]:
    """Number of steps, and the result."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return count, finished.value
        count += 1


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCalibrationText, match=r"none\.txt"):
        read_text(tmp_path / "none.txt")


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
    run(measure_once(model, tokenizer, tmp_path, "some/other-model"))
    found = find_profile(tmp_path, model)
    assert found is not None
    assert (found.model, found.text) == ("some/other-model", "calibration.txt")


def test_a_profile_is_measured_once_in_steps_and_then_found(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    assert find_profile(tmp_path, model) is None
    with capture_logs() as logged:
        steps, sensitivity = run(measure_once(model, tokenizer, tmp_path, REFERENCE))
    assert steps == 2 * 16, "two passes of 16 blocks"
    assert len(logged) >= 2 + 7, "its beginning, its progress and its end"
    found = find_profile(tmp_path, model)
    assert found is not None
    assert found.sensitivity == sensitivity
    assert found.model == "the reference model"


def test_another_data_directory_takes_the_profile_of_the_cache(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    _, sensitivity = run(measure_once(model, tokenizer, tmp_path / "one", REFERENCE))
    steps, found = run(measure_once(model, tokenizer, tmp_path / "two", REFERENCE))
    assert (steps, found) == (0, sensitivity)
    assert find_profile(tmp_path / "two", model) == find_profile(tmp_path / "one", model)
    steps, _ = run(measure_once(model, tokenizer, tmp_path / "three", "read as English"))
    assert steps > 0, "a profile on another text is another one"


def test_a_damaged_profile_of_the_cache_is_measured_again(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path, cache: Path
) -> None:
    _, sensitivity = run(measure_once(model, tokenizer, tmp_path / "one", REFERENCE))
    next((cache / "profiles").iterdir()).write_text("{")
    steps, found = run(measure_once(model, tokenizer, tmp_path / "two", REFERENCE))
    assert steps > 0
    assert found == sensitivity


def test_a_cache_that_cannot_be_written_costs_a_warning(
    model: LoadedModel, tokenizer: ChatTokenizer, tmp_path: Path, cache: Path
) -> None:
    cache.write_text("a file")
    with capture_logs() as logged:
        _, sensitivity = run(measure_once(model, tokenizer, tmp_path, REFERENCE))
    assert "layer profile not saved" in [line["event"] for line in logged]
    found = find_profile(tmp_path, model)
    assert found is not None
    assert found.sensitivity == sensitivity


def test_a_profile_of_another_model_prevents_the_start(model: LoadedModel, tmp_path: Path) -> None:
    kept = profile.measure(model, list(range(200)), name="kept", text="numbers")
    profile.save(kept.model_copy(update={"fingerprint": "another"}), profile_path(tmp_path, model))
    with pytest.raises(ProfileRefused, match="delete it"):
        find_profile(tmp_path, model)


async def test_a_worker_splits_budgets_by_its_models_profile(
    model: LoadedModel, tmp_path: Path
) -> None:
    kept = profile.measure(model, list(range(200)), name="kept", text="numbers")
    kept = kept.model_copy(update={"sensitivity": (0.0, 0.3, 0.1, 0.1, 0.2)})
    profile.save(kept, profile_path(tmp_path, model))
    assert await bounds_of_a_session(tmp_path) == split_rows(kept.sensitivity)


async def test_a_worker_without_a_profile_starts_at_once_and_measures_for_a_session(
    model: LoadedModel, tmp_path: Path
) -> None:
    with capture_logs() as logged:
        bounds = await bounds_of_a_session(tmp_path)
    events = [line["event"] for line in logged]
    assert events.index("model loaded") < events.index("layers' sensitivity measured")
    found = find_profile(tmp_path, model)
    assert found is not None
    assert bounds == split_rows(found.sensitivity)


async def bounds_of_a_session(data: Path) -> list[int]:
    """Rows of each layer over those of the first, of a session split by sensitivity."""
    calls = build_worker_service(MODEL_PATH, data, SETTINGS, ram_bytes=1 << 20)
    try:
        memory = await calls.open(pb.OpenRequest(spec=BY_SENSITIVITY))
    finally:
        await calls.close()
    return [rows - memory.bound_rows[0] for rows in memory.bound_rows]


def split_rows(sensitivity: tuple[float, ...]) -> list[int]:
    floor = SETTINGS.min_budget
    rows = split_budget(128, 5, "sensitivity", floor=floor, weights=sensitivity)
    return [each - rows[0] for each in rows]


async def test_a_context_too_short_to_measure_in_gives_no_profile(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    LlamaForCausalLM(config).save_pretrained(tmp_path / "short")
    tokenizer.inner.save_pretrained(tmp_path / "short")
    calls = build_worker_service(tmp_path / "short", tmp_path / "data", SETTINGS, ram_bytes=1 << 20)
    try:
        with pytest.raises(BadSettings, match="profile"):
            await calls.open(pb.OpenRequest(spec=BY_SENSITIVITY))
    finally:
        await calls.close()
    assert not (tmp_path / "data" / "profiles").exists()
