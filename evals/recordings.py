"""Recorded conversations of files and folders, as `--data` names them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.errors import BadDataFile
from kvrecall_server.replay.formats import read_recordings
from kvrecall_server.replay.recording import Recording

_SUFFIXES = (".json", ".jsonl", ".traj")


@dataclass(frozen=True)
class RecordingPlace:
    """A recording by its file and its number in the file. `source` names what it belongs to."""

    source: str
    path: str
    number: int


def list_recordings(source: Path) -> list[RecordingPlace]:
    """Every recording of a file, or of a folder's files. Raises BadDataFile, BadReplayFile."""
    files = [source]
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        raise BadDataFile(f"{source} has no JSON file in it")
    return [
        RecordingPlace(source.stem, str(path), number)
        for path in files
        for number in range(len(read_recordings(path)))
    ]


def read_recording(place: RecordingPlace) -> Recording:
    """The recording at a place. Raises BadReplayFile."""
    return read_recordings(Path(place.path))[place.number]


def read_all(sources: Sequence[Path]) -> list[Recording]:
    """All recordings of several sources. Raises BadDataFile, BadReplayFile."""
    paths = dict.fromkeys(place.path for source in sources for place in list_recordings(source))
    return [recording for path in paths for recording in read_recordings(Path(path))]
