"""The kernels in Triton's compiler, which makes machine code for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Shared memory of a program that every GPU since Ampere has.
MOST_SHARED = 99 << 10


@pytest.mark.parametrize(
    ("capability", "numbers", "dim"), [("80", "bf16", "128"), ("90", "fp32", "256")]
)
def test_the_kernels_compile_for_gpus(
    capability: str, numbers: str, dim: str, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "tests.workers.kernels.compile_kernels")
    ended = subprocess.run(
        [*command, capability, numbers, dim],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    compiled = json.loads(ended.stdout)
    assert list(compiled) == ["score", "weigh", "draw", "attend"]
    for name, (machine_code, shared) in compiled.items():
        assert machine_code > 0, name
        assert shared <= MOST_SHARED, f"{name}: {shared} bytes"
