"""Rows of the benchmark of pauses, from given measurements."""

from typing import Any

import pytest

from benchmarks.pauses import NO_REPAIR, REPAIR, Plan, Side, build_rows
from kvrecall.client import Repair
from kvrecall_server.reporting.results import Row

PLAN = Plan(1, 100, 2, 64, 16, "snapkv", 0.2, 2.0, 0.5)


def repaired(trigger: str, in_pause: bool) -> Repair:
    return Repair(
        trigger=trigger,
        signal_tokens=4,
        observed_tokens=4,
        candidates=64,
        scored_rows=64,
        share_scanned=1.0,
        promoted=16,
        demoted=16,
        seconds=0.01,
        truncated=False,
        bytes_read=1024,
        in_pause=in_pause,
    )


@pytest.fixture
def rows() -> dict[tuple[Any, Any], Row]:
    on = Side(REPAIR, "a", [0.2, 0.4, 0.6], [0.1, 0.3, 0.5], [], left_out=1)
    on.repairs += [
        repaired("tool_call", True),
        repaired("tool_result", True),
        repaired("tool_result", False),
    ]
    off = Side(NO_REPAIR, "b", [0.2, 0.2, 0.3], [0.1, 0.1, 0.2])
    return {(row["condition"], row.get("metric")): row for row in build_rows((on, off), PLAN)}


def test_repairs_that_were_stopped_early_or_not_started_count_against_their_pauses(
    rows: dict[tuple[Any, Any], Row],
) -> None:
    assert rows["repairs that ended in their pause: all", None]["mean"] == 0.5
    assert rows["repairs that ended in their pause: tool_call", None]["mean"] == 1.0
    assert rows["repairs that ended in their pause: tool_result", None]["mean"] == 0.5


def test_times_to_the_first_token_are_compared_by_medians_and_in_pairs(
    rows: dict[tuple[Any, Any], Row],
) -> None:
    assert rows[REPAIR, "time to first token"]["ratio"] == 2.0
    assert rows[f"{REPAIR} over {NO_REPAIR}, paired", "time to first token"]["median"] == 2.0
    assert rows["repair on tool_result", "share scanned"]["n"] == 2
