"""Does the time of an answer tell another tenant's session from one that does not exist?

`python -m benchmarks.foreign_sessions` serves the gateway over SQLite and over a real Redis (over a
worker that computes nothing), each in a process of its own. A tenant creates sessions and uses them,
so that caches hold them; another tenant asks for these and for ids that do not exist, in a random
order over one connection. Of every second foreign session its owner has read the repairs right
before: not the session, since a client sends the same URL a little faster the second time. Both must
get the same status and, but for the id, the same body.

A row has both medians' ratio, the share of pairs in which the foreign session's answer took longer
(0.5: no difference) and the p-value of a two-sided Mann-Whitney test. As many tests as rows are
made: the smallest p-value is to be compared with 0.05 divided by the number of rows. `--control`
adds a row of answers that take one more call of the catalog than those about missing sessions: the
owner's, about the repairs of its sessions. That test must tell them apart.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import numpy as np

from benchmarks.front_door import RESULTS, Subject, served_gateways
from kvrecall.reporting.results import Row, build_results

OWNER = {"X-Kvrecall-Tenant": "owner"}
STRANGER = {"X-Kvrecall-Tenant": "stranger"}
MESSAGES = {"messages": [{"role": "user", "content": "The code is K7777."}]}
WARM_REQUESTS = 100


@dataclass(frozen=True)
class Request:
    """A request for a session: a method, the end of its path, a body."""

    name: str
    method: str
    rest: str = ""
    body: Mapping[str, Any] | None = None


REQUESTS = (
    Request("read", "GET"),
    Request("turn", "POST", "/turns", MESSAGES),
    Request("event", "POST", "/events", {"type": "tool_call.started", "call_id": "c"}),
    Request("fork", "POST", "/fork", {}),
    Request("deletion", "DELETE"),
)
CONTROL = Request("repairs", "GET", "/repairs")


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, default=1000, help="of each kind and request")
    parser.add_argument("--sessions", type=int, default=200, help="of the owner")
    parser.add_argument("--control", action="store_true", help="add what must be told apart")
    parser.add_argument("--out", type=Path, default=RESULTS / "foreign-sessions.json")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    rows = measure(given.answers, given.sessions, rng, given.control)
    for row in rows:
        print(
            f"{row['condition']}: p {row['p_value']:.3f}, foreign slower in "
            f"{row['share_slower']:.3f} of pairs, medians {row['ratio']:.3f}, n {row['n']}",
            flush=True,
        )
    build_results("foreign_sessions", given.seed, "none", rows).write(given.out)


def measure(answers: int, sessions: int, rng: random.Random, control: bool) -> list[Row]:
    """Rows of both catalogs and all requests."""
    with tempfile.TemporaryDirectory() as folder, served_gateways(Path(folder)) as subjects:
        rows = []
        for subject in subjects:
            with httpx.Client(base_url=subject.url, timeout=60) as http:
                owned = [create_session(http) for _ in range(sessions)]
                for request in REQUESTS:
                    times = time_answers(http, request, owned, answers, rng, STRANGER)
                    rows.append(compare(f"{subject.name}, {request.name}", *times))
                if control:
                    rows.append(measure_control(http, subject, owned, answers, rng))
        return rows


def create_session(http: httpx.Client) -> str:
    """Create a session of the owner with a turn; return its id."""
    created = http.post("/v1/sessions", json={"seed": 1}, headers=OWNER).raise_for_status()
    session = str(created.json()["id"])
    turn = {**MESSAGES, "generate": False}
    http.post(f"/v1/sessions/{session}/turns", json=turn, headers=OWNER).raise_for_status()
    return session


def measure_control(
    http: httpx.Client, subject: Subject, owned: Sequence[str], answers: int, rng: random.Random
) -> Row:
    """Compare answers that differ by design: the owner's own sessions and missing ones."""
    times = time_answers(http, CONTROL, owned, answers, rng, OWNER, alike=False)
    return compare(f"{subject.name}, control: the owner's own sessions", *times)


def time_answers(
    http: httpx.Client,
    request: Request,
    owned: Sequence[str],
    answers: int,
    rng: random.Random,
    sender: Mapping[str, str],
    alike: bool = True,
) -> tuple[list[float], list[float]]:
    """Seconds of answers about the owner's and about missing sessions, `answers` of each."""
    kinds = [True, False] * (answers + WARM_REQUESTS)
    rng.shuffle(kinds)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number, exists in enumerate(kinds):
        session = rng.choice(owned) if exists else f"s_{token_hex(12)}"
        touched = session if exists else rng.choice(owned)
        if number % 2:
            http.get(f"/v1/sessions/{touched}/repairs", headers=OWNER).raise_for_status()
        started = time.perf_counter()
        answer = http.request(
            request.method,
            f"/v1/sessions/{session}{request.rest}",
            json=request.body,
            headers=dict(sender),
        )
        times[exists].append(time.perf_counter() - started)
        if alike:
            expected = f"there is no session '{session}'"
            assert (answer.status_code, answer.json()["detail"]) == (404, expected), answer.text
    return times[True][WARM_REQUESTS:], times[False][WARM_REQUESTS:]


def compare(condition: str, foreign: Sequence[float], missing: Sequence[float]) -> Row:
    """The row of two samples of equal size."""
    share, p_value = compare_ranks(foreign, missing)
    ratio = float(np.median(foreign) / np.median(missing))
    return {
        "condition": condition,
        "metric": "answers about a foreign and about a missing session",
        "unit": "ratio of medians",
        "n": len(foreign),
        "ratio_to": "missing",
        "ratio": round(ratio, 4),
        "share_slower": round(share, 4),
        "p_value": round(p_value, 5),
    }


def compare_ranks(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The share of pairs in which the first is larger, and the p-value of Mann-Whitney's test.

    Two-sided, by the normal approximation with tie correction (Mann & Whitney, 1947): good from
    about 20 values of each on.
    """
    pooled = np.concatenate([np.asarray(first), np.asarray(second)])
    _, inverse, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[inverse]
    a, b, n = len(first), len(second), len(pooled)
    larger = float(ranks[:a].sum()) - a * (a + 1) / 2
    ties = float((counts**3 - counts).sum()) / (n * (n - 1))
    spread = math.sqrt(a * b / 12 * (n + 1 - ties))
    z = abs(larger - a * b / 2) / spread if spread else 0.0
    return larger / (a * b), math.erfc(z / math.sqrt(2))


if __name__ == "__main__":
    main()
