"""`python -m benchmarks.faults.can_fail`: breaks the code on purpose, and the suite has to notice.

Each breakage is a small change of a copy of the tree. The suite runs there with the faults that
should find it, and with a seed that does within minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = (
    "benchmarks",
    "evals",
    "gateway",
    "kvrecall",
    "kvstore",
    "reference",
    "services",
    "workers",
)
# A service that starts no more is waited for 10 minutes, as each of its requests is.
MINUTES = 40.0
FAILED = 1


class EditDoesNotApplyError(Exception):
    """The text that an edit replaces is not in the file: the code has changed, and so must it."""


@dataclass(frozen=True)
class Edit:
    """A text that is replaced wherever it is in a file, or in all Python files of a folder."""

    path: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Edit a copy of the tree. Raises EditDoesNotApplyError."""
        target = tree / self.path
        if not target.exists():
            raise EditDoesNotApplyError(f"there is no {self.path}; adapt the edit")
        files = sorted(target.rglob("*.py")) if target.is_dir() else [target]
        found = [file for file in files if self.old in file.read_text(encoding="utf-8")]
        if not found:
            raise EditDoesNotApplyError(f"{self.path} has no {self.old!r}; adapt the edit")
        for file in found:
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Breakage:
    """Edits that break the code, and the arguments of a run that has to find them."""

    name: str
    edits: tuple[Edit, ...]
    arguments: tuple[str, ...]


_NO_SYNC = "(lambda descriptor: None)("
BREAKAGES = (
    Breakage(
        "fsync removed",
        (
            Edit("kvstore", "os.fsync(", _NO_SYNC),
            Edit("services", "synchronous=FULL", "synchronous=OFF"),
        ),
        ("--setup", "embedded, power", "--faults", "8", "--seed", "1"),
    ),
    Breakage(
        "fsync of pages removed",
        (Edit("kvstore", "os.fsync(", _NO_SYNC),),
        ("--setup", "embedded, power", "--faults", "8", "--seed", "1"),
    ),
    Breakage(
        "epoch check removed",
        (
            Edit(
                "services/catalog/redis/scripts/apply_commit.lua",
                "if ARGV[2] ~= '' and ARGV[2] ~= epoch then",
                "if false then",
            ),
        ),
        ("--setup", "cluster, stale writers", "--faults", "30", "--seed", "1"),
    ),
    Breakage(
        "fence removed",
        (
            Edit(
                "kvstore/tiers/redis/scripts/session_index.lua",
                "return tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)",
                "return 0",
            ),
        ),
        ("--setup", "cluster, stale writers", "--faults", "30", "--seed", "1"),
    ),
    Breakage(
        "A1 put back: every stored row counts as committed",
        (
            Edit(
                "kvstore/format/commit_history.py",
                "return self.points[index - 1].length if index else 0",
                "return 1 << 62",
            ),
            Edit(
                "kvstore/format/commit_history.py",
                "return self.points[index].epoch if index < len(self.points) else 0",
                "return 0",
            ),
        ),
        (
            *("--setup", "drills", "--kind", "drill: an abort, a move, and back"),
            *("--faults", "3", "--seed", "1"),
        ),
    ),
)


def main() -> None:
    """Break the code in each way; exits with 1 if a breakage is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [breakage.name for breakage in BREAKAGES]
    parser.add_argument("--only", choices=names, action="append", help="default: all")
    given = parser.parse_args()
    missed = []
    intact: dict[tuple[str, ...], set[str]] = {}
    for breakage in BREAKAGES:
        if breakage.name not in (given.only or names):
            continue
        if breakage.arguments not in intact:
            intact[breakage.arguments] = run_in_copy("intact", (), breakage.arguments)
        found = run_in_copy(breakage.name, breakage.edits, breakage.arguments)
        # What fails without the breakage too is no sign of it.
        if not found - intact[breakage.arguments]:
            missed.append(breakage.name)
    for name in missed:
        print(f"NOT FOUND: {name}")
    if any(intact.values()):
        print("the suite fails on intact code too, see above")
    sys.exit(1 if missed or any(intact.values()) else 0)


def run_in_copy(name: str, edits: Sequence[Edit], arguments: Sequence[str]) -> set[str]:
    """The kinds of failures that the suite finds in a copy of the tree with these edits.

    Raises subprocess.SubprocessError if it could not run, EditDoesNotApplyError.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrecall-can-fail-") as folder:
        tree = break_copy(edits, Path(folder) / "tree")
        out = Path(folder) / "faults.json"
        command = [sys.executable, "-m", "benchmarks.faults", "--round", "1000", *arguments]
        ended = subprocess.run(
            [*command, "--work", str(Path(folder) / "work"), "--out", str(out)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
        )
        if ended.returncode not in (0, FAILED) or not out.exists():
            raise subprocess.SubprocessError(f"{name}: the suite broke off: {ended.stderr[-2000:]}")
        kinds = _failures(out)
    seconds = time.monotonic() - start
    found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "clean"
    print(f"{name} ({' '.join(arguments)}): {found} ({seconds:.0f} s)", flush=True)
    return set(kinds)


def break_copy(edits: Sequence[Edit], tree: Path) -> Path:
    """A copy of the tree with these edits. Raises EditDoesNotApplyError."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part,
            tree / part,
            ignore=shutil.ignore_patterns("__pycache__", "runs", "results"),
        )
    for edit in edits:
        edit.apply(tree)
    return tree


def _failures(out: Path) -> dict[str, int]:
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    return {row["metric"]: row["n"] for row in rows if row["condition"] == "wrong" and row["n"]}


if __name__ == "__main__":
    main()
