"""`kvrecall profile-layers`: a table, a plot, and a profile in the data directory."""

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.app.calibration import profile_path
from kvrecall_server.cli.profile_layers import profile_layers_command
from reference import MODEL_PATH
from workers.model import layer_sensitivity as profile
from workers.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The reference model."""
    return load_model(MODEL_PATH)


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


def test_the_command_measures_on_as_many_tokens_as_a_worker() -> None:
    assert signature(profile_layers_command).parameters["tokens"].default == profile.TOKENS
