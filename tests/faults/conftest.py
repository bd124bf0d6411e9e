"""Short form of the fault suite: a model, a few scripts, and their undisturbed transcripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.faults.load.client import Transcript
from benchmarks.faults.rounds import create_folder, record_undisturbed
from benchmarks.faults.load.scripts import Script
from benchmarks.faults.load.scripts import scripts as build_scripts
from benchmarks.faults.rig.setups import embedded, endless_model


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parent of the rounds' folders."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def model(root: Path) -> Path:
    """The reference model with answers of the maximum length."""
    return endless_model(root)


@pytest.fixture(scope="session")
def scripts() -> Sequence[Script]:
    """Scripts of the short form."""
    return build_scripts(5, 2)


@pytest.fixture(scope="session")
def undisturbed(root: Path, model: Path, scripts: Sequence[Script]) -> Mapping[int, Transcript]:
    """Transcripts of a service without faults."""
    return record_undisturbed(embedded(create_folder(root, "undisturbed"), model), scripts)
