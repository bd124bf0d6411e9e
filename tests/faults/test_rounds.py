"""A few faults to each set-up, for CI; `make faults` injects thousands."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from faults.drills.table import run_drills
from faults.findings import Findings, read_findings
from faults.kinds.schedule import POWER
from faults.load.scripts import Script
from faults.load.talks import talk_scripts
from faults.rig.setups import Rig
from faults.rounds import Round
from faults.runs import SETUPS, open_rig
from faults.undisturbed import Undisturbed, undisturbed_service
from tests.end_to_end.models.kinds import KINDS, RECURRENT_KIND, save

FAULTS = 5
# With these seeds the first five faults are of five kinds: among others losses of power, a failing
# sync, a full disk, flipped bits, a worker that is stopped until its sessions have moved, partitions
# and a drain.
SEEDS = {"embedded": "146", "cluster": "107760", "files only": "2260"}


@pytest.mark.parametrize("name", SEEDS)
def test_acknowledged_turns_survive_and_nothing_is_left_over(
    name: str, root: Path, rig: Rig, scripts: Sequence[Script], undisturbed: Undisturbed
) -> None:
    build, weights = SETUPS[name]
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    found = Round(build(folder, rig), scripts, undisturbed, SEEDS[name]).run(weights, FAULTS)
    assert found.faults == len(found.counts["faults"]) == FAULTS
    assert found.counts["acknowledged"]["turn"] > 0
    assert failures(found) == {}


def test_acknowledged_turns_survive_in_workers_of_two_ranks(
    root: Path, rig: Rig, scripts: Sequence[Script], undisturbed: Undisturbed
) -> None:
    folder = root / "ranks-of-files"
    folder.mkdir()
    build, weights = SETUPS["files only"]
    setup = build(folder, replace(rig, ranks=2))
    found = Round(setup, scripts, undisturbed, SEEDS["files only"]).run(weights, FAULTS)
    assert found.faults == FAULTS
    assert found.counts["acknowledged"]["turn"] > 0
    assert failures(found) == {}


def test_acknowledged_turns_of_a_model_with_recurrent_states_survive(
    root: Path, scripts: Sequence[Script]
) -> None:
    """Their answers are those that an undisturbed service of the same model gives."""
    folder = root / "hybrid"
    (folder / "round").mkdir(parents=True)
    saved = save(KINDS[RECURRENT_KIND], folder / RECURRENT_KIND)
    build, weights = SETUPS["embedded"]
    with (
        open_rig(folder, saved) as rig,
        undisturbed_service(folder / "undisturbed", rig, scripts, talk_scripts(5, 3)) as calm,
    ):
        setup = build(folder / "round", rig)
        found = Round(setup, scripts, calm, SEEDS["embedded"]).run(weights, FAULTS)
    assert found.faults == FAULTS
    assert found.counts["acknowledged"]["turn"] > 0
    assert failures(found) == {}


def test_durable_rows_survive_losses_of_power(
    root: Path, rig: Rig, scripts: Sequence[Script], undisturbed: Undisturbed
) -> None:
    assert rig.shim is not None, "install a C compiler, such as gcc"
    folder = root / "power"
    folder.mkdir()
    build, _ = SETUPS["embedded, power"]
    found = Round(build(folder, rig), scripts, undisturbed, "1", sound=True).run(POWER, FAULTS)
    assert found.counts["faults"]["power lost, all"] > 0
    assert failures(found) == {}


def test_a_worker_of_another_version_is_left_out(
    root: Path, rig: Rig, undisturbed: Undisturbed
) -> None:
    only = ["drill: worker of another version"]
    found = run_drills(root / "drills", rig, undisturbed.urls, "1", 1, only)
    assert found.counts["faults"] == {only[0]: 1}
    assert failures(found) == {}


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = Findings()
    found.count("faults", Counter({"clock jumps": 2}))
    found.fail("torn streams", ["one"])
    found.write(tmp_path / "found.json")
    assert read_findings(tmp_path / "found.json") == found


def failures(found: Findings) -> Mapping[str, Sequence[str]]:
    return {kind: texts for kind, texts in found.failures.items() if texts}
