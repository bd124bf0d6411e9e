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

from evals.codecs import RAW, stored_of
from evals.conditions import (
    BASE,
    CONDITIONS,
    FULL,
    MATCHED,
    RANDOM,
    REPAIR,
    SPREAD,
    SWAP,
    WITHOUT_K,
    Before,
)
from evals.suite import Record, Suite
from evals.suites.mq_niah.case import Case, Protocol, begun
from evals.suites.mq_niah.examples import PARTITIONS
from evals.suites.mq_niah.rows import result_rows
from kvstore.settings import CodecName

KS = (8, 16, 24, 32, 48, 64, 80, 96, 128)
BASE_OF = {2: "1/12", 4: "1/16", 6: "1/16", 8: "1/16"}
"""Base budgets at which matched no-repair is neither near nothing nor near the full cache, found on seeds 0 to 4."""
CODED = (FULL, BASE, MATCHED, RANDOM, REPAIR, SPREAD, SWAP)
"""Conditions of a comparison of codecs."""


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
        protocol = self.protocol
        return f"{protocol.needles}q {protocol.policy} {self.partition} {protocol.codec}, seed {self.seed}"


def suite(
    protocol: Protocol,
    counts: Sequence[int],
    ks: Sequence[int],
    seed: int,
    cases: int,
    bases: dict[int, str],
    codecs: Sequence[CodecName] = (RAW,),
) -> Suite[Frontier]:
    """So many cases for each number of needles: examples from `seed` on, each under every partition in turn.

    With several codecs each case under each of them, the conditions of `CODED`.
    """
    conditions = CODED if len(codecs) > 1 else tuple(CONDITIONS)
    units = [
        Frontier(replace(made, codec=codec), one, partition, tuple(ks), conditions)
        for made in (replace(protocol, needles=count, base=bases[count]) for count in counts)
        for one, partition in cases_of(made.needles, seed, cases)
        for codec in codecs
    ]
    return Suite(
        "mq-niah", seed, protocol.model, tuple(units), run, partial(result_rows, seed=seed)
    )


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
                records.append(
                    {
                        **_identity(unit),
                        "condition": name,
                        "k": k,
                        **_measured(case, ready, name, k),
                    }
                )
        stored = stored_of(case.cache.replayed.engine.store, case.cache.replayed.state.length)
        return [*records, {**_identity(unit), "kind": "stored", **stored}]


def _identity(unit: Frontier) -> dict[str, Any]:
    told = {
        "needles": unit.protocol.needles,
        "policy": unit.protocol.policy,
        "base": unit.protocol.base,
    }
    return {
        "kind": "case",
        "codec": unit.protocol.codec,
        **told,
        "seed": unit.seed,
        "partition": unit.partition,
    }


def _measured(case: Case, ready: Before, name: str, k: int) -> dict[str, Any]:
    started = time.perf_counter()
    held = CONDITIONS[name](ready, k)
    seconds = time.perf_counter() - started
    return {**case.told_of(ready, held), "seconds": held.report.seconds if held.report else seconds}
