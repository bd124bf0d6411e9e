"""GGUF files before they are converted: unusable ones, and where conversions are. Imports no torch."""

import hashlib
import json
import re
from pathlib import Path

from workers.errors import ModelRefused

# Part of a conversion's name: another number makes every file be converted again.
FORMAT = 2
CONVERSIONS = "gguf-*-v[0-9]*"
"""Pattern of the folders of conversions, of any format."""

_SOURCE = "converted-from.json"
_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def get_conversion_folder(file: Path, cache: Path) -> Path:
    """Return the folder of a file's conversion, which is named by the digest of its content."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return cache / f"gguf-{digest[:32]}-v{FORMAT}"


def write_source(folder: Path, file: Path) -> None:
    """Note in a conversion's folder which file it is of."""
    (folder / _SOURCE).write_text(json.dumps({"file": str(file.absolute())}), encoding="utf-8")


def read_source(folder: Path) -> str | None:
    """Read which file a conversion is of; None where it was not noted."""
    try:
        return str(json.loads((folder / _SOURCE).read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError):
        return None


def refuse_unusable(file: Path) -> None:
    """Raise ModelRefused for a file that cannot be a whole GGUF file."""
    try:
        with file.open("rb") as content:
            begin = content.read(len(_LFS_POINTER))
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}; check the path") from error
    if begin == _LFS_POINTER:
        raise ModelRefused(f"{file} is a Git LFS pointer, not the file itself; run: git lfs pull")
    if not begin.startswith(_MAGIC):
        raise ModelRefused(
            f"{file} is no GGUF file: it begins with {begin[:4]!r}, not {_MAGIC!r}; download it again"
        )
    if _SPLIT_NAME.search(file.name):
        raise ModelRefused(
            f"{file} is one part of a split GGUF file; merge the parts first: "
            "llama-gguf-split --merge FIRST_PART MERGED.gguf"
        )
