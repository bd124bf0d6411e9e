"""The native code as the tests use it: what an installation built, or built here from the source."""

import subprocess
import sys
from pathlib import Path

import torch

from workers.native.attention import NativeAttention
from workers.native.library import find_files, open_library
from workers.retrieval.sampling import ROTATIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "workers" / "native"
SOURCES = (ROOT / "setup.py", *FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))


def build_native(folder: Path) -> Path:
    """Return a folder with the native code of this source, built into `folder` if there is none.

    Fails without a C++ compiler: the tests of native code are never skipped.
    """
    newest = max(path.stat().st_mtime for path in SOURCES)
    built = find_files()
    if built and min(path.stat().st_mtime for path in built.values()) >= newest:
        return FOLDER
    folders = ("--build-lib", str(folder), "--build-temp", str(folder / "objects"))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *folders]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    made = folder / "workers" / "native"
    assert find_files(made), f"the tests need a C++ compiler, such as Debian's g++: {ended.stderr}"
    return made


def open_native(folder: Path) -> NativeAttention:
    """Open the native code for this CPU, in the folder that `build_native` returned."""
    level, library = open_library(torch.backends.cpu.get_cpu_capability(), folder)
    assert level is not None
    assert library is not None
    return NativeAttention(level, library, ROTATIONS)
