"""`python -m benchmarks.faults`: rounds of faults up to a total, then the counts."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.faults import report
from benchmarks.faults.faults import CLUSTER, EMBEDDED
from benchmarks.faults.rounds import Findings, Round, create_folder, record_undisturbed
from benchmarks.faults.scripts import scripts
from benchmarks.faults.setups import Setup, cluster, embedded, embedded_apart, endless_model
from kvrecall.reporting.results import build_results

RESULT = Path(__file__).parents[1] / "results" / "faults.json"
SCRIPTS = 8
SETUPS: Mapping[str, tuple[Callable[[Path, Path], Setup], Mapping[str, float]]] = {
    "embedded": (embedded, EMBEDDED),
    "embedded, rows apart": (embedded_apart, EMBEDDED),
    "cluster": (cluster, CLUSTER),
}


@dataclass(frozen=True)
class Plan:
    """Numbers of faults in total and in a round, of concurrent rounds, and the set-ups in turn.

    Everything else follows from the seed.
    """

    seed: int
    faults: int
    round_faults: int
    at_once: int
    setups: Sequence[str]

    @property
    def rounds(self) -> list[int]:
        """Number of faults of each round."""
        whole, rest = divmod(self.faults, self.round_faults)
        return [self.round_faults] * whole + [rest] * bool(rest)


def main() -> None:
    """Read the command line, run, print and write the counts. Exits with 1 on failures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--round", type=int, default=25, help="faults of one set-up before its checks"
    )
    parser.add_argument("--at-once", type=int, default=4, help="rounds that run concurrently")
    parser.add_argument(
        "--setup", choices=tuple(SETUPS), action="append", help="default: all, in turn"
    )
    parser.add_argument("--keep", action="store_true", help="keep logs and files of the rounds")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    plan = Plan(given.seed, given.faults, given.round, given.at_once, given.setup or tuple(SETUPS))
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="kvrecall-faults-"))
    try:
        findings = run(plan, folder, console)
    finally:
        if given.keep:
            console.print(f"the rounds' logs and files are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report.print_report(findings, console)
    build_results("faults", plan.seed, "reference", report.build_rows(findings)).write(given.out)
    sys.exit(0 if report.is_clean(findings) else 1)


def run(plan: Plan, folder: Path, console: Console) -> list[Findings]:
    """Run all rounds, each on a set-up of its own."""
    model = endless_model(folder)
    all_scripts = scripts(plan.seed, SCRIPTS)
    undisturbed = record_undisturbed(
        embedded(create_folder(folder, "undisturbed"), model), all_scripts
    )

    def run_round(number: int, faults: int) -> Findings:
        name = plan.setups[number % len(plan.setups)]
        build, weights = SETUPS[name]
        setup = build(create_folder(folder, f"round-{number}"), model)
        seed = f"{plan.seed}-{number}"
        found = Round(setup, all_scripts, undisturbed, seed).run(weights, faults)
        state = "clean" if report.is_clean([found]) else "NOT CLEAN"
        turns = found.counters.acknowledged["turn"]
        console.print(
            f"round {number}, {name}: {found.faults.total()} faults, "
            f"{turns} turns acknowledged, {state}"
        )
        if not report.is_clean([found]):
            report.print_report([found], console)
        return found

    with ThreadPoolExecutor(plan.at_once) as pool:
        return list(pool.map(run_round, range(len(plan.rounds)), plan.rounds))


if __name__ == "__main__":
    main()
