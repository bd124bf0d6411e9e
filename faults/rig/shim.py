"""Compilation of shim.c, where there is a C compiler."""

import shutil
import subprocess
from pathlib import Path

PRELOAD = "LD_PRELOAD"
SOURCE = Path(__file__).with_name("shim.c")


def compile_shim(folder: Path) -> Path | None:
    """The compiled shim in `folder`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    compiled = folder / "shim.so"
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", compiled, SOURCE, "-ldl", "-lpthread"],
            check=True,
            capture_output=True,
        )
    return compiled
