"""`python -m faults.can_fail`: breaks the code on purpose, and the suite has to notice.

Each breakage is a small change of a copy of the tree. The suite runs there with the faults that
should find it, and with a seed that does within minutes. A run that ended leaves a file in the
folder `--work`, so that an interrupted call goes on where it was. When all have ended, the result
file is written and the folder is removed.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvrecall_server.reporting.results import Row, build_results

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "faults-can-fail.json"
WORK = Path("runs") / "faults-can-fail"
PARTS = (
    "benchmarks",
    "evals",
    "faults",
    "gateway",
    "kvrecall",
    "kvrecall_server",
    "kvstore",
    "reference",
    "services",
    "workers",
)
MINUTES = 40.0
FAILED = 1
SEED = 1


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


# What is broken for good is waited for two minutes in each copy, not ten.
PATIENCE = (
    Edit("faults/load/client.py", "GIVE_UP_SECONDS = 600.0", "GIVE_UP_SECONDS = 120.0"),
    Edit("faults/rig/processes.py", "END_SECONDS = 600.0", "END_SECONDS = 120.0"),
)
_NO_SYNC = "(lambda descriptor: None)("
BREAKAGES = (
    Breakage(
        "fsync removed",
        (
            Edit("kvstore", "os.fsync(", _NO_SYNC),
            Edit("services", "synchronous=FULL", "synchronous=OFF"),
        ),
        ("--setup", "embedded, power", "--faults", "8", "--seed", str(SEED)),
    ),
    Breakage(
        "fsync of pages removed",
        (Edit("kvstore", "os.fsync(", _NO_SYNC),),
        ("--setup", "embedded, power", "--faults", "8", "--seed", str(SEED)),
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
        (
            *("--setup", "drills", "--kind", "drill: commit after a takeover"),
            *("--faults", "2", "--seed", str(SEED)),
        ),
    ),
    Breakage(
        "parent left out of the id",
        (Edit("kvrecall/domain/page_ids.py", 'b"page", parent, packed)', 'b"page", packed)'),),
        (
            *("--setup", "drills", "--kind", "drill: a text that repeats itself"),
            *("--faults", "1", "--seed", str(SEED)),
        ),
    ),
    Breakage(
        "pins ignored",
        (
            Edit(
                "kvstore/hierarchy/page_holders.py",
                "if page_id not in self._counts]",
                "]",
            ),
        ),
        (
            *("--setup", "drills", "--kind", "drill: pages deleted under a turn"),
            *("--faults", "1", "--seed", str(SEED)),
        ),
    ),
    Breakage(
        "sweep deletes at first sight",
        (
            Edit("services/pages/sweep.py", "sorted(unknown & before)", "sorted(unknown)"),
            Edit("services/pages/sweep.py", "=self._limits.unknown_page_seconds", "=0.0"),
        ),
        (
            *("--setup", "drills", "--kind", "drill: worker restarted before the commit"),
            *("--faults", "1", "--seed", str(SEED)),
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Number of failures by kind that the suite found in a copy, and the seconds that it took."""

    found: Mapping[str, int]
    seconds: float


def main() -> None:
    """Break the code in each way; exits with 1 if a breakage is not found."""
    parser = argparse.ArgumentParser(prog="python -m faults.can_fail", description=__doc__)
    names = [breakage.name for breakage in BREAKAGES]
    parser.add_argument("--only", choices=names, action="append", help="default: all")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs that ended")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    chosen = [each for each in BREAKAGES if each.name in (given.only or names)]
    rows = [run_both(breakage, given.work) for breakage in chosen]
    if all(outcome_file(each, given.work).exists() for each in BREAKAGES):
        rows = [run_both(breakage, given.work) for breakage in BREAKAGES]
        results = build_results("faults-can-fail", SEED, "reference", rows)
        replace(results, command=parser.prog).write(given.out)
        shutil.rmtree(given.work)
    for row in rows:
        if not row["noticed"]:
            print(f"NOT FOUND: {row['condition']}")
        if row["intact"]:
            print(f"the suite fails on intact code too: {row['intact']} ({row['arguments']})")
    sys.exit(0 if all(row["noticed"] and not row["intact"] for row in rows) else 1)


def run_both(breakage: Breakage, work: Path) -> Row:
    """Row of a breakage: what the suite finds with it and without it, now or in an earlier call.

    Raises subprocess.SubprocessError if it could not run, EditDoesNotApplyError.
    """
    intact = run_once(Breakage("intact", (), breakage.arguments), work)
    broken = run_once(breakage, work)
    return {
        "condition": breakage.name,
        "arguments": shlex.join(breakage.arguments),
        # What fails without the breakage too is no sign of it.
        "noticed": bool(set(broken.found) - set(intact.found)),
        "found": broken.found,
        "intact": intact.found,
        "seconds": round(broken.seconds),
    }


def run_once(breakage: Breakage, work: Path) -> Outcome:
    """What the suite finds in a copy of the tree with this breakage, unless it has run already.

    Raises subprocess.SubprocessError if it could not run, EditDoesNotApplyError.
    """
    file = outcome_file(breakage, work)
    if file.exists():
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    outcome = run_in_copy(breakage)
    found = ", ".join(f"{number} x {kind}" for kind, number in outcome.found.items()) or "clean"
    print(
        f"{breakage.name} ({shlex.join(breakage.arguments)}): {found} ({outcome.seconds:.0f} s)",
        flush=True,
    )
    work.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    draft.replace(file)
    return outcome


def run_in_copy(breakage: Breakage) -> Outcome:
    """Run the suite in a copy of the tree with this breakage.

    Raises subprocess.SubprocessError if it could not run, EditDoesNotApplyError.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrecall-can-fail-") as folder:
        tree = break_copy(breakage.edits, Path(folder) / "tree")
        out = Path(folder) / "faults.json"
        command = [sys.executable, "-m", "faults", "--round", "1000"]
        places = ["--work", str(Path(folder) / "work"), "--out", str(out)]
        ended = subprocess.run(
            [*command, *breakage.arguments, *places],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
        )
        if ended.returncode not in (0, FAILED) or not out.exists():
            raise subprocess.SubprocessError(
                f"{breakage.name}: the suite broke off: {ended.stderr[-2000:]}"
            )
        return Outcome(_failures(out), time.monotonic() - start)


def break_copy(edits: Sequence[Edit], tree: Path) -> Path:
    """A copy of the tree with these edits. Raises EditDoesNotApplyError."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part,
            tree / part,
            ignore=shutil.ignore_patterns("__pycache__", "runs", "results"),
        )
    for edit in (*PATIENCE, *edits):
        edit.apply(tree)
    return tree


def outcome_file(breakage: Breakage, work: Path) -> Path:
    """File of a run that ended; another one when the breakage has changed."""
    digest = hashlib.sha256(repr(breakage).encode()).hexdigest()[:8]
    return work / f"{breakage.name.partition(':')[0].replace(' ', '-')}-{digest}.json"


def _failures(out: Path) -> dict[str, int]:
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    return {row["metric"]: row["n"] for row in rows if row["condition"] == "wrong" and row["n"]}


if __name__ == "__main__":
    main()
