"""Suite mq-niah: facts that the second turn asks for, after the cache was compressed for the first.

RepairKV 3 to 5. All conditions of a case start from the same compressed cache and have the same
number of active rows, see `evals.conditions`. A unit is one example under one partition of its
needles, with all conditions at all K: the paired case of the paper.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evals.codecs import RAW, storage_columns
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
    BaselineState,
)
from evals.suite import Record, Suite
from evals.suites.mq_niah.case import Case, Protocol, open_case
from evals.suites.mq_niah.examples import PARTITIONS
from evals.suites.mq_niah.rows import result_rows
from kvstore.settings import CodecName

KS = (8, 16, 24, 32, 48, 64, 80, 96, 128)
# Base budgets, by number of needles, at which matched no-repair is neither near nothing nor near
# the full cache, found on seeds 0 to 4.
BASE_BUDGETS = {2: "1/12", 4: "1/16", 6: "1/16", 8: "1/16"}
# Conditions of a comparison of codecs.
CODEC_CONDITIONS = (FULL, BASE, MATCHED, RANDOM, REPAIR, SPREAD, SWAP)


@dataclass(frozen=True)
class Frontier:
    """One example and partition with every condition at every K."""

    protocol: Protocol
    seed: int
    partition: str
    ks: tuple[int, ...] = KS
    conditions: tuple[str, ...] = tuple(CONDITIONS)

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        protocol = self.protocol
        name = f"{protocol.needles}q {protocol.policy} {self.partition} {protocol.codec}"
        return f"{name}, seed {self.seed}"


def suite(
    protocol: Protocol,
    counts: Sequence[int],
    ks: Sequence[int],
    seed: int,
    cases: int,
    bases: dict[int, str],
    codecs: Sequence[CodecName] = (RAW,),
    conditions: Sequence[str] = (),
) -> Suite[Frontier]:
    """`cases` cases for each number of needles: examples from `seed` on, each under all partitions.

    The conditions are the full cache and those named; all without a name. Several codecs run each
    case under each of them, without a name with the conditions of `CODEC_CONDITIONS`.
    """
    every = CODEC_CONDITIONS if len(codecs) > 1 else tuple(CONDITIONS)
    chosen = tuple(name for name in CONDITIONS if name in (FULL, *(conditions or every)))
    units = [
        Frontier(replace(sized, codec=codec), case_seed, partition, tuple(ks), chosen)
        for sized in (replace(protocol, needles=count, base=bases[count]) for count in counts)
        for case_seed, partition in list_cases(sized.needles, seed, cases)
        for codec in codecs
    ]
    return Suite(
        "mq-niah", seed, protocol.model, tuple(units), run, partial(result_rows, seed=seed)
    )


def list_cases(needles: int, seed: int, cases: int) -> list[tuple[int, str]]:
    """Seeds with partitions: all partitions of an example before the next example."""
    partitions = PARTITIONS[needles]
    count = len(partitions)
    return [(seed + case // count, partitions[case % count]) for case in range(cases)]


def run(unit: Frontier) -> list[Record]:
    """Compress once, then measure every condition at every K.

    Raises BadExample, BadBudget, `workers.errors`.
    """
    with open_case(unit.protocol, unit.seed, unit.partition) as case:
        baseline = case.build_baseline()
        records: list[Record] = [
            {
                **_identity(unit),
                "condition": name,
                "k": k,
                **_measure(case, baseline, name, k),
            }
            for name in unit.conditions
            for k in ((0,) if name in WITHOUT_K else unit.ks)
        ]
        session = case.cache.session
        stored = storage_columns(session.engine.store, session.state.length)
        return [*records, {**_identity(unit), "kind": "stored", **stored}]


def _identity(unit: Frontier) -> dict[str, Any]:
    return {
        "kind": "case",
        "codec": unit.protocol.codec,
        **protocol_columns(unit.protocol),
        "seed": unit.seed,
        "partition": unit.partition,
    }


def protocol_columns(protocol: Protocol) -> dict[str, Any]:
    """Record columns that identify a protocol."""
    return {
        "needles": protocol.needles,
        "facts": protocol.needles + protocol.distractors,
        "policy": protocol.policy,
        "base": protocol.base,
    }


def _measure(case: Case, baseline: BaselineState, name: str, k: int) -> dict[str, Any]:
    started = time.perf_counter()
    result = CONDITIONS[name](baseline, k)
    seconds = time.perf_counter() - started
    columns = case.measure(baseline, result)
    return {**columns, "seconds": result.repair_seconds if result.report else seconds}
