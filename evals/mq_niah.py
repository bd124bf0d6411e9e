"""Suite mq-niah: facts that the second turn asks for, after the cache was compressed for the first (RepairKV 3 to 5).

All conditions of a case start from the same compressed cache and have the same number of active rows; see
`mq_niah_conditions`. A unit is one example under one partition of its needles, with all conditions at all K: the
paired case of the paper.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evals.conditions import CONDITIONS, WITHOUT_K, Before
from evals.mq_niah_case import Case, Protocol, begun
from evals.mq_niah_examples import PARTITIONS
from evals.mq_niah_rows import result_rows
from evals.suite import Record, Suite

KS = (8, 16, 24, 32, 48, 64, 80, 96, 128)
BASE_OF = {2: "1/12", 4: "1/16", 6: "1/16", 8: "1/16"}
"""Base budgets at which matched no-repair is neither near nothing nor near the full cache, found on seeds 0 to 4."""


@dataclass(frozen=True)
class Frontier:
    """One example and partition: every condition at every K."""

    protocol: Protocol
    seed: int
    partition: str
    ks: tuple[int, ...] = KS
    conditions: tuple[str, ...] = tuple(CONDITIONS)

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{self.protocol.needles}q {self.protocol.policy} {self.partition}, seed {self.seed}"


def suite(
    protocol: Protocol, counts: Sequence[int], ks: Sequence[int], seed: int, cases: int, bases: dict[int, str]
) -> Suite[Frontier]:
    """So many cases for each number of needles: examples from `seed` on, each under every partition in turn."""
    units = [
        Frontier(replace(protocol, needles=count, base=bases[count]), one, partition, tuple(ks))
        for count in counts
        for one, partition in cases_of(count, seed, cases)
    ]
    return Suite("mq-niah", seed, protocol.model, tuple(units), run, partial(result_rows, seed=seed))


def cases_of(needles: int, seed: int, cases: int) -> list[tuple[int, str]]:
    """Seeds with partitions: all partitions of an example before the next example."""
    partitions = PARTITIONS[needles]
    return [(seed + at // len(partitions), partitions[at % len(partitions)]) for at in range(cases)]


def run(unit: Frontier) -> list[Record]:
    """Compress once, then every condition at every K. Raises BadExample, BadBudget, `workers.errors`."""
    with begun(unit.protocol, unit.seed, unit.partition) as case:
        ready = case.before()
        records = list[Record]()
        for name in unit.conditions:
            for k in (0,) if name in WITHOUT_K else unit.ks:
                records.append({**_identity(unit), "condition": name, "k": k, **_measured(case, ready, name, k)})
        return records


def _identity(unit: Frontier) -> dict[str, Any]:
    told = {"needles": unit.protocol.needles, "policy": unit.protocol.policy, "base": unit.protocol.base}
    return {"kind": "case", **told, "seed": unit.seed, "partition": unit.partition}


def _measured(case: Case, ready: Before, name: str, k: int) -> dict[str, Any]:
    started = time.perf_counter()
    held = CONDITIONS[name](ready, k)
    seconds = time.perf_counter() - started
    return {**case.told_of(ready, held), "seconds": held.report.seconds if held.report else seconds}
