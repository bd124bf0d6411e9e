"""Runs of the program of this folder: alone, or as several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")
WAIT = 300


def run(scenario: str, model: Path, folder: Path, ranks: int = 1) -> dict[str, Any]:
    """Run a scenario on so many ranks; returns what it found."""
    found = begin(scenario, model, folder, ranks)
    assert found.wait(WAIT) == 0
    result: dict[str, Any] = json.loads(out_of(folder, ranks).read_text())
    return result


def begin(scenario: str, model: Path, folder: Path, ranks: int) -> "subprocess.Popen[bytes]":
    """Begin a scenario on so many ranks."""
    launcher = [
        *("-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
        f"--nproc-per-node={ranks}",
    ]
    command = [
        sys.executable,
        *(launcher if ranks > 1 else ()),
        *(str(PROGRAM), scenario, str(model), str(out_of(folder, ranks))),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def out_of(folder: Path, ranks: int) -> Path:
    """Where a run writes what it found."""
    return folder / f"{ranks}.json"
