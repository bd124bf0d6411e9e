"""Units in processes of their own: in order, once, and resumed after failures and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from evals.errors import UnitFailed
from evals.runner import run
from evals.suite import Suite

Squares = Callable[..., Suite[Any]]
Ran = Callable[[], list[int]]


@pytest.mark.parametrize("processes", [1, 2])
def test_records_come_in_the_units_order_however_long_each_takes(
    squares: Squares, silent: Console, tmp_path: Path, processes: int
) -> None:
    suite = squares(3, 1, 2, seconds=lambda number: 0.2 * (number == 3))
    found = run(suite, tmp_path / "j.jsonl", silent, processes)
    assert [record["square"] for record in found] == [9, 1, 4]


def test_units_in_the_journal_are_not_run_again(
    squares: Squares, silent: Console, tmp_path: Path, ran: Ran
) -> None:
    journal = tmp_path / "j.jsonl"
    run(squares(1, 2), journal, silent, 1)
    assert [record["square"] for record in run(squares(1, 2, 3), journal, silent, 1)] == [1, 4, 9]
    assert ran() == [1, 2, 3]


def test_a_unit_that_fails_is_named_and_earlier_records_stay(
    squares: Squares, silent: Console, tmp_path: Path, ran: Ran
) -> None:
    journal = tmp_path / "j.jsonl"
    with pytest.raises(UnitFailed, match="square of 2: ValueError: no square today"):
        run(squares(1, 2, breaks=2), journal, silent, 1)
    run(squares(1, 5), journal, silent, 1)
    assert ran() == [1, 2, 5]


def test_a_killed_runner_resumes_and_leaves_no_process(
    squares: Squares, silent: Console, tmp_path: Path, ran: Ran
) -> None:
    journal = tmp_path / "j.jsonl"
    suite = squares(1, 2, 3, seconds=lambda number: 0.0 if number == 1 else 60.0)
    module = sys.modules[suite.run.__module__]
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(str(module.__file__)).parent)!r})
from rich.console import Console
from evals.runner import run
from evals.suite import Suite
import {module.__name__} as light
if __name__ == "__main__":
    seconds = ((1, 0.0), (2, 60.0), (3, 60.0))
    units = tuple(light.Square(n, s, {str(tmp_path / "ran.txt")!r}) for n, s in seconds)
    suite = Suite("squares", 0, "none", units, light.run, light.rows)
    run(suite, Path({str(journal)!r}), Console(quiet=True), 2)
"""
    path = tmp_path / "runs.py"
    path.write_text(script)
    process = subprocess.Popen([sys.executable, str(path)])
    wait_until(lambda: journal.exists() and journal.read_bytes().endswith(b"\n"), process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert gone
    line = json.loads(journal.read_text())
    assert line["records"] == [{"kind": "square", "number": 1, "square": 1}]
    assert run(squares(1, seconds=lambda _: 0.0), journal, silent, 1)[0]["square"] == 1
    assert ran() == [1]


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the runner ended before it was killed"
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
