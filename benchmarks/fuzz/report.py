"""Report of a run: replies by door and status, and the findings with their requests."""

import json
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz.findings import Findings
from kvrecall_server.reporting.results import Row


def build_rows(findings: Findings) -> list[Row]:
    """Return the counts as rows of a result file."""
    rows: list[Row] = [
        {"condition": door, "metric": status, "unit": "count", "n": number}
        for (door, status), number in sorted(findings.replies.items())
    ]
    rows += [
        {"condition": "run", "metric": name, "unit": "count", "n": number}
        for name, number in sorted(findings.other.items())
    ]
    rows.append({"condition": "run", "metric": "requests", "unit": "count", "n": findings.requests})
    found = list(findings)
    rows += [
        {
            "condition": each.door,
            "metric": f"finding: {each.problem.kind}",
            "unit": "count",
            "n": each.times,
        }
        for each in found
    ]
    rows.append(
        {"condition": "run", "metric": "kinds of findings", "unit": "count", "n": len(found)}
    )
    return rows


def print_findings(findings: Findings, console: Console) -> None:
    """Print each finding with its request."""
    for each in findings:
        console.print(json.dumps(each.describe()), style="red", soft_wrap=True, markup=False)


def write_findings(findings: Findings, folder: Path) -> None:
    """Write each finding to a file, whose request `--again FILE` sends again."""
    for number, each in enumerate(findings):
        text = json.dumps(each.describe(), indent=1)
        (folder / f"finding-{number}.json").write_text(text + "\n", encoding="utf-8")
