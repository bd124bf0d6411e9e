"""Short form of the fault suite: a model, a few scripts, and an undisturbed service."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from faults.load.scripts import Script
from faults.load.scripts import scripts as build_scripts
from faults.load.talks import talk_scripts
from faults.rig.setups import Rig
from faults.runs import open_rig
from faults.undisturbed import Undisturbed, undisturbed_service


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parent of the rounds' folders."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def rig(root: Path) -> Iterator[Rig]:
    """The reference model with answers of the maximum length, and a zygote."""
    with open_rig(root) as rig:
        yield rig


@pytest.fixture(scope="session")
def scripts() -> Sequence[Script]:
    """Scripts of the short form."""
    return build_scripts(5, 2)


@pytest.fixture(scope="session")
def undisturbed(root: Path, rig: Rig, scripts: Sequence[Script]) -> Iterator[Undisturbed]:
    """A service without faults, and its transcripts."""
    talks = talk_scripts(5, 3)
    with undisturbed_service(root / "undisturbed", rig, scripts, talks) as undisturbed:
        yield undisturbed
