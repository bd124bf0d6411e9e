"""What the service chooses where a request for a session leaves it open."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import BudgetOutOfRange
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.sessions.request import CreateSession, resolve_settings
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import PAUSE_TRIGGERS, RepairTrigger, SessionSettings
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo

LEAST = 37


def resolved(limits: ServiceLimits | None = None, **request: Any) -> SessionSettings:
    """Settings of a new session, in a worker whose least budget is 37."""
    info = WorkerInfo(
        model="reference",
        fingerprint="one",
        layers=5,
        kv_heads=2,
        head_dim=48,
        slots=1,
        min_budget=LEAST,
        max_budget=10_000,
        block_tokens=256,
        max_context=16_384,
        page_tokens=64,
        token_bytes=960,
        methods=(MethodInfo("full"), MethodInfo("snapkv"), MethodInfo("icecache", retrieves=True)),
        repair=None,
    )
    return resolve_settings(CreateSession(**request), info, limits or ServiceLimits())


def chosen(**request: Any) -> int:
    """Rows that a new session keeps free for repair."""
    return resolved(**request).repair_rows


@pytest.mark.parametrize(
    ("budget", "rows"), [(None, 128), (256, 64), (512, 64), (937, 117), (1875, 234), (8192, 1024)]
)
def test_the_rows_for_repair_grow_with_the_budget(budget: int | None, rows: int) -> None:
    """An automatic budget is at least 1,024 rows."""
    assert chosen(method="snapkv", budget=budget) == rows


def test_answers_that_retrieve_leave_nothing_to_repair_unless_it_is_asked_for() -> None:
    assert chosen() == chosen(method="snapkv", retrieve=Retrieval(share=0.25)) == 0
    assert chosen(repair_rows=64) == 64


def test_the_full_cache_has_nothing_to_repair() -> None:
    assert chosen(method="full") == 0


@pytest.mark.parametrize(
    ("default", "asked", "budget"),
    [(None, None, None), (None, 256, 256), (256, None, 256), (256, "auto", None), (256, 512, 512)],
)
def test_a_budget_is_automatic_unless_the_request_or_the_operator_names_one(
    default: int | None, asked: Any, budget: int | None
) -> None:
    limits = ServiceLimits(default_budget=default)
    assert resolved(limits, budget=asked).budget == budget


def test_a_request_that_names_their_number_gets_it() -> None:
    for rows in (0, 1, 64, 1000):
        assert chosen(budget=8192, repair_rows=rows) == rows
    with pytest.raises(BudgetOutOfRange, match="leave less than 37"):
        chosen(budget=256, repair_rows=220)


@given(st.integers(LEAST, 10_000))
def test_what_is_kept_free_leaves_the_least_budget(budget: int) -> None:
    rows = chosen(method="snapkv", budget=budget)
    assert 0 <= rows <= budget - LEAST
    assert rows >= min(64, budget - LEAST)


@pytest.mark.parametrize(
    ("request_", "before_turns"),
    [
        ({}, False),
        ({"method": "snapkv"}, True),
        ({"method": "snapkv", "retrieve": Retrieval(share=0.25)}, False),
        ({"method": "snapkv", "retrieve": Retrieval(index="exact")}, False),
        ({"method": "icecache"}, False),
        ({"method": "icecache", "retrieve": Retrieval(share=0)}, True),
    ],
)
def test_repairs_run_in_pauses_and_before_turns_whose_answers_do_not_retrieve(
    request_: dict[str, Any], before_turns: bool
) -> None:
    repair_on = resolved(**request_).repair_on
    assert repair_on >= PAUSE_TRIGGERS
    assert (RepairTrigger.TURN in repair_on) == before_turns
    assert RepairTrigger.LAST_OUTPUT not in repair_on


@pytest.mark.parametrize("signals", [frozenset(), frozenset({RepairTrigger.LAST_OUTPUT})])
def test_a_request_that_names_its_signals_gets_them(signals: frozenset[RepairTrigger]) -> None:
    assert resolved(repair_on=signals).repair_on == signals
