"""`python -m benchmarks.fuzz`: attack all doors for some minutes, then the counts and findings."""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz import report
from benchmarks.fuzz.requests import Request
from benchmarks.fuzz.run import DOORS, Plan, open_door, open_rig, run
from benchmarks.fuzz.service import running_service
from benchmarks.fuzz.world import World
from kvrecall.reporting.results import build_results

RESULT = Path(__file__).parents[1] / "results" / "fuzz.json"


def main() -> None:
    """Read the command line, run, print and write the counts. Exits with 1 on findings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--door", choices=DOORS, action="append", help="default: all, in turn")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, help="folder of logs and findings")
    parser.add_argument(
        "--again", type=Path, metavar="FINDING", help="send the request of a finding's file again"
    )
    given = parser.parse_args()
    console = Console()
    folder = (given.work or Path("runs") / "fuzz" / str(given.seed)).resolve()
    if given.again is not None:
        send_again(given.again, console)
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = run(Plan(given.seed, given.door or DOORS, minutes=given.minutes), folder)
    report.write_findings(found, folder)
    report.print_report(found, console)
    build_results("fuzz", given.seed, "reference", report.build_rows(found)).write(given.out)
    sys.exit(1 if list(found) else 0)


def send_again(file: Path, console: Console) -> None:
    """Send the request of a finding to a service of its own, and print reply and problems."""
    request = Request.from_described(json.loads(file.read_text(encoding="utf-8"))["request"])
    with (
        tempfile.TemporaryDirectory() as folder,
        open_rig() as rig,
        running_service(Path(folder) / "again", rig) as service,
        ExitStack() as stack,
    ):
        door = open_door(request.door, service, World(), (), stack)
        reply = door.send(request)
        console.print(reply, markup=False)
        for problem in door.check(request, reply):
            console.print(f"{problem.kind}: {problem.seen}", style="red", markup=False)


if __name__ == "__main__":
    main()
