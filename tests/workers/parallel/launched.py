"""Runs of the program of this folder: alone, or as several ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")
WAIT = 300


def run(cases: Mapping[str, tuple[str, Path]], folder: Path, ranks: int = 1) -> dict[str, Any]:
    """Run scenarios, each with the model of a folder, in one launch of so many ranks.

    Returns by the cases' names what each found, or why its model was refused.
    """
    out = folder / f"{ranks}.json"
    launcher = [
        *("-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
        f"--nproc-per-node={ranks}",
    ]
    command = [
        sys.executable,
        *(launcher if ranks > 1 else ()),
        *(str(PROGRAM), json.dumps(cases, default=str), str(out)),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=WAIT)
    found: dict[str, Any] = json.loads(out.read_text())
    return found
