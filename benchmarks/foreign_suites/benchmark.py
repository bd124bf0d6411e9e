"""llama.cpp's server tests against `kvrecall serve`: the cases that pass, and why others do not.

`python -m benchmarks llama-cpp --tests path/to/llama.cpp/tools/server/tests`, which the source package
of llama-cpp-python has under vendor/. The tests run in an environment of their own, made at first.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.foreign_suites.reasons import REASONS
from benchmarks.peers.environments import python_with
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.reporting.results import Row

ROOT = Path(__file__).parents[2]
SUITES = ("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "tokenize")
# Names under which the tests call the model.
ALIASES = '["tinyllama-2", "test", "gpt-3.5-turbo-instruct", "davinci-002", "gpt-4.1"]'
PACKAGES = ("pytest", "pytest-timeout", "filelock", "numpy", "openai", "requests", "wget")
SHIM = "llama_cpp_shim"
_SECONDS = 120


@dataclass(frozen=True)
class Plan:
    """Where the tests are, and the model that is asked."""

    tests: Path = field(metadata={"help": "llama.cpp's tools/server/tests"})
    model: str = "reference"


def measure(plan: Plan) -> Measured:
    """Run the suites against a server of this machine."""

    def rows() -> Iterator[Row]:
        os.environ["KVRECALL_GATEWAY__MODEL_ALIASES"] = ALIASES
        python = python_with(ROOT / "build" / "foreign_suites", PACKAGES)
        with server_at(None, ServerNeeds(model=plan.model)) as url:
            yield from run_cases(python, plan.tests, url)

    return Measured("llama-cpp-cases.json", plan.model, rows())


def describe(row: Row) -> str:
    """A case as a line of text."""
    return f"{row['suite']}::{row['case']}: {row['outcome']} {row.get('reason', '')}"


def run_cases(python: Path, tests: Path, url: str) -> Iterator[Row]:
    """Run the suites against a server, and yield a row for each of their cases."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {
            **os.environ,
            "DEBUG_EXTERNAL": "1",
            "PORT": url.rpartition(":")[2],
            "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, tests))),
        }
        command: Sequence[str] = (
            *(str(python), "-m", "pytest", "-q", "-p", SHIM, "-p", "no:cacheprovider"),
            *("--timeout", str(_SECONDS), "--junitxml", str(report), "-m", "not slow"),
            *(f"unit/test_{suite}.py" for suite in SUITES),
        )
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            yield read_case(case.attrib, [child.tag for child in case])


def read_case(case: Mapping[str, str], found: Sequence[str]) -> Row:
    """Return the row of a case, with the reason that is known for one that does not pass."""
    suite = case["classname"].rpartition("test_")[2]
    outcome = next((kind for kind in ("failure", "error", "skipped") if kind in found), "passed")
    row = {"suite": suite, "case": case["name"], "outcome": outcome}
    if outcome == "passed":
        return row
    known = REASONS.get(f"{suite}::{case['name'].partition('[')[0]}", "not known")
    return {**row, "reason": known}


BENCHMARK = Benchmark(
    "llama-cpp-cases", "llama.cpp's server tests against the service", Plan, measure, describe
)
