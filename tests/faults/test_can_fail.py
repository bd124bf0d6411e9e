"""The breakages of `make faults-can-fail` apply to the code as it is."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from faults.can_fail import (
    BREAKAGES,
    PATIENCE,
    ROOT,
    Breakage,
    Edit,
    EditDoesNotApplyError,
    Outcome,
    outcome_file,
    run_both,
)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=[each.name for each in BREAKAGES])
def test_a_breakage_applies_to_the_present_code(breakage: Breakage, tmp_path: Path) -> None:
    for edit in (*PATIENCE, *breakage.edits):
        source, target = ROOT / edit.path, tmp_path / edit.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif not target.exists():
            shutil.copy(source, target)
        edit.apply(tmp_path)


def test_an_edit_whose_text_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("one = 1\n")
    with pytest.raises(EditDoesNotApplyError, match=r"code\.py has no"):
        Edit("code.py", "two", "three").apply(tmp_path)
    with pytest.raises(EditDoesNotApplyError, match="there is no"):
        Edit("gone.py", "two", "three").apply(tmp_path)


@pytest.mark.parametrize(("kind", "noticed"), [("turns lost", True), ("slow", False)])
def test_runs_that_ended_are_not_run_again_and_what_intact_code_fails_is_no_sign(
    kind: str, noticed: bool, tmp_path: Path
) -> None:
    broken = BREAKAGES[0]
    keep(Breakage("intact", (), broken.arguments), Outcome({"slow": 2}, 5.0), tmp_path)
    keep(broken, Outcome({kind: 1}, 7.0), tmp_path)
    row = run_both(broken, tmp_path)
    assert (row["condition"], row["noticed"], row["seconds"]) == (broken.name, noticed, 7)
    assert (row["found"], row["intact"]) == ({kind: 1}, {"slow": 2})


def keep(breakage: Breakage, outcome: Outcome, work: Path) -> None:
    """As a run that ended leaves it."""
    outcome_file(breakage, work).write_text(json.dumps(asdict(outcome)))
