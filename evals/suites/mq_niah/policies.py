"""Suite mq-niah policies: the same repair after other first stages (RepairKV 5.4, Figure 4).

The methods of `workers.methods` score as in a session; whole tokens are kept by the mean over
layers and heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from evals.conditions import BASE, FULL, MATCHED, OLDEST, RANDOM, REPAIR, SPREAD
from evals.suite import Suite
from evals.suites.mq_niah.case import Protocol
from evals.suites.mq_niah.rows import result_rows
from evals.suites.mq_niah.suite import BASE_BUDGETS, Frontier, list_cases, run

POLICIES = ("snapkv", "h2o", "streaming_llm", "scissorhands")
# The first stage that is keyed to the first turn's replies.
KEYED = "snapkv"
STRESSED = "scissorhands"
STRESSED_NEEDLES = 6
STRESSED_KS = (48, 64, 80, 96, 128)
# Base budget of first stages that are not keyed: even of so many rows they hardly keep a needle
# whole.
UNKEYED_BASE = "1/2"
CONDITIONS = (FULL, BASE, MATCHED, RANDOM, OLDEST, REPAIR, SPREAD)
_NEEDLES = 4


def suite(protocol: Protocol, ks: Sequence[int], seed: int, cases: int) -> Suite[Frontier]:
    """Every policy with four needles; the stress test with six (Table 3)."""
    runs = [(policy, _NEEDLES, tuple(ks)) for policy in POLICIES]
    runs.append((STRESSED, STRESSED_NEEDLES, tuple(k for k in STRESSED_KS if k in ks)))
    units = [
        Frontier(
            replace(
                protocol,
                policy=policy,
                needles=needles,
                base=protocol.base or _base(policy, needles),
            ),
            case_seed,
            partition,
            policy_ks,
            CONDITIONS,
        )
        for policy, needles, policy_ks in runs
        if policy_ks
        for case_seed, partition in list_cases(needles, seed, cases)
    ]
    return Suite(
        "mq-niah policies", seed, protocol.model, tuple(units), run, partial(result_rows, seed=seed)
    )


def _base(policy: str, needles: int) -> str:
    return BASE_BUDGETS[needles] if policy == KEYED else UNKEYED_BASE
