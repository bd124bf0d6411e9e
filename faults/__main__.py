"""`python -m faults`: rounds of faults up to a total, then the counts.

`python -m faults rolling` is the operator's drill instead, see its `--help`.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from faults import report
from faults.rig import redis_servers
from faults.rolling import command as rolling
from faults.runs import DRILL_ROUND, SETUPS, TURNS, TURNS_OF_RANKS, Plan, Run
from kvrecall_server.reporting.results import build_results
from reference import MODEL_PATH

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "faults.json"
UNFINISHED = 3


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--round", type=int, default=40, help="faults of one set-up before its checks"
    )
    parser.add_argument("--at-once", type=int, default=3, help="rounds that run concurrently")
    parser.add_argument(
        "--setup", choices=(*SETUPS, DRILL_ROUND), action="append", help="default: all, in turn"
    )
    parser.add_argument("--kind", action="append", default=[], help="default: all of the set-up")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of each worker (--tensor-parallel)"
    )
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="folder of the served model")
    parser.add_argument(
        "--window",
        type=int,
        help="tokens of the model's context, such as 256: sessions go on behind it. Default: its own",
    )
    parser.add_argument(
        "--redis",
        help=f"the Redis servers: one of {', '.join(redis_servers.PACKAGED)} or a program. Default: "
        f"what {redis_servers.VARIABLE} names, else the first",
    )
    parser.add_argument(
        "--work", type=Path, help="folder of the rounds' findings; done rounds are not run again"
    )
    parser.add_argument("--minutes", type=float, help="begin no round later than this")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser


def main() -> None:
    """Read the command line, run, print and write the counts.

    Exits with 1 on failures, with 3 if rounds are left to a later call.
    """
    if sys.argv[1:2] == [rolling.NAME]:
        rolling.main(sys.argv[2:])
    given = build_parser().parse_args()
    if given.redis is not None:
        os.environ[redis_servers.VARIABLE] = given.redis
    plan = Plan(
        given.seed,
        given.faults,
        given.round,
        given.at_once,
        given.setup or (TURNS if given.ranks == 1 else TURNS_OF_RANKS),
        given.kind,
        str(given.model.resolve()),
        given.ranks,
        given.window,
    )
    work = given.work or Path("runs") / "faults" / f"{plan.faults}-{plan.seed}"
    console = Console()
    run = Run(plan, work.resolve(), console)
    if given.minutes is not None:
        run.stop_at = time.monotonic() + 60 * given.minutes
    found = run.run()
    if found is None:
        console.print(f"rounds are left; the same command goes on ({work})", soft_wrap=True)
        sys.exit(UNFINISHED)
    report.print_report(found, console)
    name = "reference" if given.model == MODEL_PATH else given.model.name
    build_results("faults", plan.seed, name, report.build_rows(found)).write(given.out)
    sys.exit(0 if found.clean else 1)


if __name__ == "__main__":
    main()
