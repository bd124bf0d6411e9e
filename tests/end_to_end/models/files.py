"""What the files of an ended process hold."""

from pathlib import Path

from kvstore.fsck import check_directory, locked_directory


def count_stored(data: Path, session: str = "") -> list[int]:
    """Pages and states in a data directory, by default of all sessions."""
    return [_count(data / folder / "pages", session) for folder in (".", "states")]


def _count(folder: Path, session: str) -> int:
    """Pages in a folder of segment files; none where there is no folder."""
    if not folder.is_dir():
        return 0
    with locked_directory(folder):
        keys = list(check_directory(folder).pages)
    return sum(key.session == session or not session for key in keys)
