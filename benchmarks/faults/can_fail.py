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
PARTS = ("benchmarks", "gateway", "kvrecall", "kvstore", "reference", "services", "workers")
MINUTES = 15.0
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
)


def main() -> None:
    """Break the code in each way; exits with 1 if a breakage is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [breakage.name for breakage in BREAKAGES]
    parser.add_argument("--only", choices=names, action="append", help="default: all")
    given = parser.parse_args()
    missed = [
        breakage.name
        for breakage in BREAKAGES
        if breakage.name in (given.only or names) and not is_found(breakage)
    ]
    for name in missed:
        print(f"NOT FOUND: {name}")
    sys.exit(1 if missed else 0)


def is_found(breakage: Breakage) -> bool:
    """Whether the suite fails in a copy of the tree with the breakage; prints the failures."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrecall-can-fail-") as folder:
        tree = break_copy(breakage.edits, Path(folder) / "tree")
        out = Path(folder) / "faults.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.faults",
            "--round",
            "1000",
            *breakage.arguments,
        ]
        ended = subprocess.run(
            [*command, "--work", str(Path(folder) / "work"), "--out", str(out)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
        )
        kinds = _failures(out) if ended.returncode == FAILED else []
    seconds = time.monotonic() - start
    print(
        f"{breakage.name}: {', '.join(kinds) or ended.stderr[-2000:] or 'clean'} ({seconds:.0f} s)"
    )
    return bool(kinds)


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


def _failures(out: Path) -> list[str]:
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    return [
        f"{row['n']} x {row['metric']}" for row in rows if row["condition"] == "wrong" and row["n"]
    ]


if __name__ == "__main__":
    main()
