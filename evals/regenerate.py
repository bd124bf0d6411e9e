"""Runs again what made result files: `python -m evals.regenerate FILE... --out FOLDER`.

For a change that moves every figure, such as new weights of the reference model. A stopped run goes
on where it was: new files that are there already stay, and the suites keep their journals.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from evals.errors import BadCommand
from kvrecall_server.reporting.results import read_results

# Options with a file or folder of recordings: a result file has its name alone.
_RECORDINGS = ("--data", "--result-data")
# Options that say where to write and whether to go on, and not what to compute.
_WRITES = ("--json", "--processes")


def main() -> None:
    """Run the commands of the given files, one after the other. Raises BadCommand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="result files of `kvrecall eval`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new files")
    parser.add_argument("--data-in", type=Path, help="folder with the recordings")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    for file in given.files:
        new = given.out / file.name
        if not new.exists():
            arguments = command_of(file, given.data_in)
            run_eval([*arguments, "--json", str(new), "--processes", str(given.processes)])


def command_of(file: Path, data_in: Path | None) -> list[str]:
    """Arguments of `kvrecall eval` that compute what is in a result file.

    data_in: folder in which recordings of these names are searched; None: the working directory.
    Raises BadCommand, and BadResultFile for a file that is none.
    """
    words = shlex.split(read_results(file).command)
    if "eval" not in words:
        raise BadCommand(f"{file} was not made by kvrecall eval, but by: {shlex.join(words)}")
    return list(_without_outputs(words[words.index("eval") + 1 :], data_in or Path()))


def _without_outputs(words: Sequence[str], data_in: Path) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in _WRITES:
            next(rest)
        elif word in _RECORDINGS:
            yield from (word, str(_find(next(rest), data_in)))
        elif word != "--fresh":
            yield word


def _find(name: str, folder: Path) -> Path:
    """The file or folder of recordings with this name. Raises BadCommand."""
    found = min(folder.rglob(Path(name).name), default=None)
    if found is None:
        raise BadCommand(f"no {name} in {folder}; give the folder that has it as --data-in")
    return found


def run_eval(arguments: Sequence[str]) -> None:
    """Run `kvrecall eval` in a process of its own. Raises subprocess.CalledProcessError."""
    subprocess.run([sys.executable, "-m", "kvrecall_server.cli", "eval", *arguments], check=True)


if __name__ == "__main__":
    main()
