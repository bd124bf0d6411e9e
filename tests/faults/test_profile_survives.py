"""A layer profile survives a loss of power whole, or is measured again."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

from faults.rig.drive import Drive
from faults.rig.shim import compile_shim

SAVE = """
import sys
from pathlib import Path
from workers.model.layer_sensitivity import Profile, save
values = dict.fromkeys(Profile.model_fields, 1)
for number in range(40):
    save(Profile.model_construct(**values), Path(sys.argv[1]) / f"profile-{number}.json")
"""


def test_a_loss_of_power_leaves_a_whole_profile_or_none(tmp_path: Path) -> None:
    shim = compile_shim(tmp_path)
    assert shim is not None, "install a C compiler, such as gcc"
    folder = tmp_path / "data"
    folder.mkdir()
    drive = Drive(shim, [folder], tmp_path / "work")
    drive.arm()
    command = [sys.executable, "-c", SAVE, str(folder)]
    subprocess.run(command, env={**os.environ, **drive.environment}, check=True)
    whole = (folder / "profile-0.json").read_bytes()
    drive.cut(Random(3))
    found = [path.read_bytes() for path in folder.glob("profile-*.json")]
    assert found
    assert set(found) == {whole}
