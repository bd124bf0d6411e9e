"""`python -m benchmarks fuzz`: attack all doors for some minutes, then the counts and findings."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.fuzz import report
from benchmarks.fuzz.requests import Request
from benchmarks.fuzz.run import DOORS, Plan, open_door, open_rig, run
from benchmarks.fuzz.service import running_service
from benchmarks.fuzz.world import World
from benchmarks.options import option
from kvrecall_server.reporting.results import Row


@dataclass(frozen=True)
class Options:
    """How long and where the service is attacked."""

    minutes: float = 60.0
    seed: int = 7
    doors: tuple[str, ...] = option(tuple(DOORS), "in turn", choices=tuple(DOORS))
    work: Path | None = option(None, "folder of logs and findings; default: runs/fuzz/SEED")
    again: Path | None = option(None, "send the request of a finding's file again")


def measure(plan: Options) -> Measured:
    """Attack a service of this machine, or send one request again, which has no rows."""
    console = Console()
    if plan.again is not None:
        send_again(plan.again, console)
        return Measured("fuzz.json", "reference", [], plan.seed)
    folder = (plan.work or Path("runs") / "fuzz" / str(plan.seed)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = run(Plan(plan.seed, plan.doors, minutes=plan.minutes), folder)
    report.write_findings(found, folder)
    report.print_findings(found, console)
    return Measured("fuzz.json", "reference", report.build_rows(found), plan.seed)


def describe(row: Row) -> str:
    """A count as a line of text."""
    return f"{row['condition']:<30} {row['metric']:<50} {row['n']}"


def has_findings(rows: Sequence[Row]) -> bool:
    """True where something was found."""
    return any(row["metric"] == "kinds of findings" and row["n"] for row in rows)


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


BENCHMARK = Benchmark(
    "fuzz", "broken requests to all doors", Options, measure, describe, failed=has_findings
)
