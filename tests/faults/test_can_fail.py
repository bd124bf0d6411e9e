"""The breakages of `make faults-can-fail` apply to the code as it is."""

import shutil
from pathlib import Path

import pytest

from benchmarks.faults.can_fail import BREAKAGES, ROOT, Breakage, Edit, EditDoesNotApplyError


@pytest.mark.parametrize("breakage", BREAKAGES, ids=[each.name for each in BREAKAGES])
def test_a_breakage_applies_to_the_present_code(breakage: Breakage, tmp_path: Path) -> None:
    for edit in breakage.edits:
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
