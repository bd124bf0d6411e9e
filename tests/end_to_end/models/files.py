"""What the files of an ended process hold."""

from pathlib import Path

from kvstore.fsck import check_directory, locked_directory


def count_stored(data: Path) -> list[int]:
    """Pages and states in a data directory."""
    return [_count(data / folder / "pages") for folder in (".", "states")]


def _count(folder: Path) -> int:
    """Pages in a folder of segment files; none where there is no folder."""
    if not folder.is_dir():
        return 0
    with locked_directory(folder):
        return len(check_directory(folder).pages)
