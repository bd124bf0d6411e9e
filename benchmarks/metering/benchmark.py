"""Compare metered tokens with computed ones over mixed requests.

`python -m benchmarks metering --url http://127.0.0.1:8420 --requests 1000` asks a running service, writes
no file, and exits with 1 unless the counts are equal.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.metering.mixture import measure as send
from benchmarks.options import option
from kvrecall_server.reporting.results import Row


@dataclass(frozen=True)
class Plan:
    """Where the service is, and how much it is asked."""

    url: str = field(metadata={"help": "of a gateway"})
    requests: int = 1000
    seed: int = 1
    operations: tuple[str, ...] = option((), "the workers' --ops addresses")


def measure(plan: Plan) -> Measured:
    """Count tokens of mixed requests."""
    tokens, ends = asyncio.run(send(plan.url, plan.requests, plan.seed, plan.operations))
    row = {"computed": tokens.computed, "metered": tokens.metered, "ends": ends}
    return Measured("metering.json", "none", [row], plan.seed)


def describe(row: Row) -> str:
    """The counts as a line of text."""
    return f"computed {row['computed']}, metered {row['metered']}, ends {row['ends']}"


def differ(rows: Sequence[Row]) -> bool:
    """True unless as much was metered as was computed."""
    return any(row["computed"] != row["metered"] for row in rows)


BENCHMARK = Benchmark(
    "metering", "metered tokens beside computed ones", Plan, measure, describe, failed=differ
)
