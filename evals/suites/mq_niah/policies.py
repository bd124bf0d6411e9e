"""Suite mq-niah policies: the same repair after other first stages (RepairKV 5.4, Figure 4, Table 3).

The methods of `workers.methods` score as they do in a session; whole tokens are kept by the mean over layers and heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from evals.conditions import BASE, FULL, MATCHED, OLDEST, RANDOM, REPAIR, SPREAD
from evals.suite import Suite
from evals.suites.mq_niah.case import Protocol
from evals.suites.mq_niah.rows import result_rows
from evals.suites.mq_niah.suite import BASE_OF, Frontier, cases_of, run

POLICIES = ("snapkv", "h2o", "streaming_llm", "scissorhands")
KEYED = "snapkv"
STRESSED = "scissorhands"
STRESSED_NEEDLES = 6
STRESSED_KS = (48, 64, 80, 96, 128)
UNKEYED_BASE = "1/2"
"""Of first stages that are not keyed to the first turn's replies: even of so much they hardly keep a needle whole."""
CONDITIONS = (FULL, BASE, MATCHED, RANDOM, OLDEST, REPAIR, SPREAD)


def suite(protocol: Protocol, ks: Sequence[int], seed: int, cases: int) -> Suite[Frontier]:
    """Every policy with four needles; the stress test with six (Table 3)."""
    wanted = [(policy, 4, tuple(ks)) for policy in POLICIES]
    wanted.append((STRESSED, STRESSED_NEEDLES, tuple(k for k in STRESSED_KS if k in ks)))
    units = [
        Frontier(
            replace(
                protocol,
                policy=policy,
                needles=needles,
                base=protocol.base or _base(policy, needles),
            ),
            one,
            partition,
            own,
            CONDITIONS,
        )
        for policy, needles, own in wanted
        if own
        for one, partition in cases_of(needles, seed, cases)
    ]
    return Suite(
        "mq-niah policies", seed, protocol.model, tuple(units), run, partial(result_rows, seed=seed)
    )


def _base(policy: str, needles: int) -> str:
    return BASE_OF[needles] if policy == KEYED else UNKEYED_BASE
