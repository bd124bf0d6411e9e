"""The short form of the fault suite: a model, a few scripts, and what a service says that nothing happens to."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.faults.rounds import folder_of, undisturbed
from benchmarks.faults.scripts import Script, scripts
from benchmarks.faults.setups import embedded, endless_model
from benchmarks.faults.speaking import Told


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rounds have their folders."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def model(root: Path) -> Path:
    """The reference model, whose answers are as long as they may be."""
    return endless_model(root)


@pytest.fixture(scope="session")
def told() -> Sequence[Script]:
    """What is said in the short form."""
    return scripts(5, 2)


@pytest.fixture(scope="session")
def calm(root: Path, model: Path, told: Sequence[Script]) -> Mapping[int, Told]:
    """What an undisturbed service answers."""
    return undisturbed(embedded(folder_of(root, "undisturbed"), model), told)
