"""The native code's file for this CPU, if the distribution was built with a C++ compiler."""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from workers.native.call import Call
from workers.native.delta import DeltaLayer
from workers.native.encode import Encode
from workers.native.gather import Gather
from workers.native.layer import Layer
from workers.native.model import Model
from workers.native.searched import Searched
from workers.native.step import Step
from workers.native.summarise import Summarise

LEVELS = ("baseline", "avx2", "avx512")
"""Instructions that the code is compiled for, by setup.py, which has what each one is."""

_FOLDER = Path(__file__).parent
# By the names that torch has for what a CPU can do, the best first.
_SUITED = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}


def find_files(folder: Path = _FOLDER) -> dict[str, Path]:
    """Find the files that were built, by their level."""
    paths = [
        (level, folder / f"attend_{level}{suffix}")
        for level in LEVELS
        for suffix in EXTENSION_SUFFIXES
    ]
    return {level: path for level, path in paths if path.is_file()}


def open_library(
    capability: str, folder: Path = _FOLDER
) -> tuple[str, ctypes.CDLL] | tuple[None, None]:
    """Open the best file for a CPU; None where none was built from these sources, or can be opened here.

    capability: as `torch.backends.cpu.get_cpu_capability` names it. Returns level and library.
    """
    built = find_files(folder)
    for level in _SUITED.get(capability, ("baseline",)):
        if level in built:
            try:
                library = ctypes.CDLL(str(built[level]))
            except OSError:
                continue  # it was built for another system
            if _takes_arguments(library):
                return level, library
    return None, None


def _takes_arguments(library: ctypes.CDLL) -> bool:
    """True if a library was built with the arguments of this program's calls."""
    arguments = {
        "argument_bytes": (Call, Searched, Gather, Encode, Summarise),
        "decode_bytes": (Step, Model, Layer, DeltaLayer),
    }
    return all(
        _count_bytes(library, name)
        == sum(ctypes.sizeof(each) * 1000**i for i, each in enumerate(of))
        for name, of in arguments.items()
    )


def _count_bytes(library: ctypes.CDLL, name: str) -> int | None:
    """Ask a library how large its arguments are; None if it does not say."""
    function = getattr(library, name, None)
    if function is None:
        return None
    function.restype = ctypes.c_int64
    return int(function())
