"""`kvrecall models`: what is on this machine, and removal of conversions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.app.models import conversions_directory
from workers.model.weights.gguf_file import write_source


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two conversions and the lock of one."""
    monkeypatch.setenv("KVRECALL_CACHE", str(tmp_path))
    for name in ("gguf-00-v1", "gguf-11-v1"):
        folder = conversions_directory() / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(3000))
    write_source(conversions_directory() / "gguf-00-v1", Path("/models/llama.gguf"))
    (conversions_directory() / "gguf-00-v1.lock").touch()
    return conversions_directory()


def test_packaged_and_converted_models_are_listed(
    command: Callable[..., Any], conversions: Path
) -> None:
    listed = {each["name"]: each for each in json.loads(command("models", "list", "--json").output)}
    assert listed["reference"]["kind"] == listed["smollm2"]["kind"] == "packaged"
    assert listed["smollm2"]["bytes"] > 1 << 20
    converted = listed["gguf-00-v1"]
    assert (converted["kind"], converted["of"]) == ("converted", "/models/llama.gguf")
    assert converted["bytes"] >= 3000
    assert "/models/llama.gguf" in command("models", "list").output


def test_a_conversion_is_removed_by_its_name(
    command: Callable[..., Any], conversions: Path
) -> None:
    found = command("models", "remove", "gguf-00-v1")
    assert (found.exit_code, "1 removed" in found.output) == (0, True)
    assert [each.name for each in conversions.glob("gguf-*-v1")] == ["gguf-11-v1"]
    assert command("models", "remove", "--all").exit_code == 0
    assert not list(conversions.glob("gguf-*-v1"))


def test_only_conversions_are_removed(command: Callable[..., Any], conversions: Path) -> None:
    for name in ("smollm2", "..", "gguf-22-v1"):
        refused = command("models", "remove", "gguf-00-v1", name)
        assert refused.exit_code == 2
        assert (
            f"no conversion is called {name}; there are: gguf-00-v1, gguf-11-v1" in refused.output
        )
    assert len(list(conversions.glob("gguf-*-v1"))) == 2
    assert "name a conversion, or --all" in command("models", "remove").output
