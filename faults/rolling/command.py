"""`python -m faults rolling`: the operator's drill, its report and its result file."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from faults.rig.setups import Rig, endless_model
from faults.rolling.drill import Drill, Plan
from faults.rolling.report import print_outcome
from faults.rolling.steps import KINDS
from kvrecall_server.reporting.results import build_results
from reference import MODEL_PATH

NAME = "rolling"
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "faults-rolling.json"


def main(arguments: Sequence[str]) -> None:
    """Run the drill, print and write what it found.

    Exits with 1 when a turn was lost or doubled, or anything else was wrong.
    """
    given = _parse(arguments)
    plan = Plan(
        given.seed,
        given.clients,
        given.calm_seconds,
        given.stopped_seconds,
        given.kind or KINDS,
    )
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        # Without a zygote: a start takes as long as an operator's.
        rig = Rig(endless_model(Path(folder), given.model.resolve()))
        outcome = Drill(Path(folder) / "drill", rig, plan, console.print).run()
    print_outcome(outcome, console)
    name = "reference" if given.model == MODEL_PATH else given.model.name
    build_results("faults-rolling", plan.seed, name, outcome.build_rows()).write(given.out)
    sys.exit(0 if outcome.clean else 1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    defaults = Plan()
    parser = argparse.ArgumentParser(prog=f"python -m faults {NAME}", description=__doc__)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument(
        "--calm-seconds", type=float, default=defaults.calm_seconds, help="between two steps"
    )
    parser.add_argument(
        "--stopped-seconds", type=float, default=defaults.stopped_seconds, help="of SIGSTOP"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="of steps; default: all")
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="folder of the served model")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(arguments)
