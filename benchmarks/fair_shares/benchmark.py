"""A short question of one tenant beside another's flood, against the same question in quiet.

`python -m benchmarks fair-shares` runs `kvrecall serve` with the packaged model, and in turn windows
without and with a flood: so many clients of one tenant, in a process of their own, send prompts of
some 2,000 tokens without pause and ask for 256 tokens each, half a second after a refusal again. That
process has the lowest priority: a flood comes from other machines. One client of another tenant asks
for 4 tokens, one question after the other. Seconds are those from the question's request to the end of
its stream. At the end of a window the flood's clients are killed; the last row has the seconds until
none of their turns runs or waits. The result file goes to `benchmarks/results/`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.fair_shares.flood import MODEL
from benchmarks.options import option
from faults.rig.metrics import sum_metrics
from faults.rig.processes import QUIET
from kvrecall_server.app.local.server import STOP_SECONDS, launch
from kvrecall_server.app.models import REFERENCE
from kvrecall_server.reporting.results import Row, speed_row
from reference import MODEL_PATH

QUIET_WINDOW = "quiet"
WARM_SECONDS = 4.0
_UNFINISHED = ("kvrecall_turns_running", "kvrecall_turns_waiting")


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    clients: tuple[int, ...] = option((16, 100), "of each flood")
    rounds: int = option(3, "windows of each kind")
    questions: int = option(15, "of a window")


def measure(plan: Plan) -> Measured:
    """Measure windows with and without a flood at a server of this machine."""

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="kvrecall-") as folder, served(Path(folder)) as url:
            yield from compare(url, plan.clients, plan.rounds, plan.questions)

    return Measured("fair-shares.json", f"the reference model ({MODEL_PATH.name})", rows())


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of `kvrecall serve` in a process of its own."""
    environment = {
        **os.environ,
        **QUIET,
        "KVRECALL_DATA": str(folder / "data"),
        "KVRECALL_MODEL": REFERENCE,
        "KVRECALL_GATEWAY__MODEL_ALIASES": f'["{MODEL}"]',
        "KVRECALL_PORT": "0",
        "KVRECALL_LOG": "json",
    }
    process, url = launch([], folder / "serve.log", "serve", environment=environment)
    with process:
        try:
            yield url
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def compare(url: str, floods: Sequence[int], rounds: int, questions: int) -> list[Row]:
    """Rows of a question's seconds in each kind of window, and of the end of abandoned turns."""
    windows = {name: list[float]() for name in (QUIET_WINDOW, *map(describe_flood, floods))}
    ends: list[float] = []
    with httpx.Client(base_url=url, timeout=120) as http:
        ask_all(http, questions)  # warm
        for _ in range(rounds):
            for clients in floods:
                windows[QUIET_WINDOW] += ask_all(http, questions)
                with flooded(url, clients):
                    time.sleep(WARM_SECONDS)
                    windows[describe_flood(clients)] += ask_all(http, questions)
                ends.append(wait_until_idle(http))
    quiet = windows[QUIET_WINDOW]
    rows = [speed_row(QUIET_WINDOW, "a short question", "seconds", quiet)]
    for name in list(windows)[1:]:
        found = windows[name]
        rows.append(
            speed_row(
                name,
                "a short question",
                "seconds",
                found,
                ratio_to=QUIET_WINDOW,
                ratio=round(median(found) / median(quiet), 2),
                p95_ratio=round(np.percentile(found, 95) / np.percentile(quiet, 95), 2),
            )
        )
    return [*rows, speed_row("killed clients", "until no turn of theirs is left", "seconds", ends)]


def describe_flood(clients: int) -> str:
    """Name the window of a flood."""
    return f"{clients} clients of another tenant"


def ask_all(http: httpx.Client, questions: int) -> list[float]:
    """Seconds of so many questions, one after the other. Raises for one that is refused."""
    return [ask(http, number) for number in range(questions)]


def ask(http: httpx.Client, number: int) -> float:
    """Ask for four tokens, streamed; return the seconds to the end of the answer."""
    began = time.perf_counter()
    body = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": f"hello {number} {began}"}],
        "max_tokens": 4,
    }
    headers = {"X-Kvrecall-Tenant": "ann"}
    with http.stream("POST", "/v1/chat/completions", headers=headers, json=body) as response:
        response.raise_for_status()
        *_, last = (line for line in response.iter_lines() if line)
    assert last == "data: [DONE]", last
    return time.perf_counter() - began


@contextmanager
def flooded(url: str, clients: int) -> Iterator[None]:
    """Keep a flood running, in a process of its own that is killed at the end.

    Asserts that it ran until then: without it the window is a quiet one.
    """
    command = [sys.executable, "-m", "benchmarks.fair_shares.flood", url, str(clients)]
    with subprocess.Popen(command) as process:
        try:
            yield
            assert process.poll() is None, f"the flood ended with {process.returncode}"
        finally:
            process.kill()


def wait_until_idle(http: httpx.Client) -> float:
    """Wait until no turn runs or waits; return the seconds."""
    began = time.perf_counter()
    while any(sum_metrics(http.get("/metrics").text)[name] for name in _UNFINISHED):
        time.sleep(0.01)
    return time.perf_counter() - began


BENCHMARK = Benchmark("fair_shares", "one tenant's question beside another's flood", Plan, measure)
