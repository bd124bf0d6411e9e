"""Rows of the result file, from given turns."""

from typing import Any

import pytest

from benchmarks.peers.agent import rows
from benchmarks.peers.agent.journal import PeerRun, find_run, store_run
from benchmarks.peers.agent.session import Measured
from benchmarks.peers.plan import Plan
from kvrecall_server.reporting.results import Row

PLAN = Plan("smollm2", (), 1, 4, 1000, 20, 0.0, 2)


def turn(number: int, first: float, right: bool = True, started: float | None = None) -> Measured:
    return Measured(
        number=number,
        age=1,
        answer="7",
        text="It is 7.",
        right=right,
        length=100 * (number + 1),
        tokens=5,
        first_token=first,
        decode=0.5,
        after=0.0,
        started=started,
        waited=0.1,
        peak_bytes=1000 + number,
    )


def run(peer: str, right: tuple[bool, ...] = (True,) * 5) -> PeerRun:
    times = (9.0, 1.0, 4.0, 2.0, 5.0)
    started = (None, None, 3.0, None, 6.0)
    turns = tuple(
        turn(number, times[number], right[number], started[number]) for number in range(5)
    )
    return PeerRun(peer, turns, {})


def by_kind(found: list[Row], peer: str) -> dict[tuple[Any, ...], Row]:
    return {
        (row["metric"], row.get("part") or row.get("turn")): row
        for row in found
        if row["condition"] == peer
    }


def test_the_first_turn_and_the_resumed_ones_are_no_usual_turns() -> None:
    found = by_kind(rows.result_rows([run("ours")], PLAN, "full", "ours"), "ours")
    assert found[rows.FIRST, "before the restart"]["median"] == 1.0
    assert found[rows.FIRST, "after the restart"]["median"] == 2.0
    assert found[rows.LAST, None]["median"] == 2.0


def test_resumed_sessions_have_rows_of_their_own() -> None:
    found = by_kind(rows.result_rows([run("ours")], PLAN, "full", "ours"), "ours")
    assert found[rows.RESUMED, 2]["median"] == 4.0
    assert found[rows.RESUMED, 4]["median"] == 5.0
    assert found[rows.RESUMED, 4]["tokens"] == 500
    assert found[rows.READY, 4]["median"] == 6.0


def test_decoding_counts_the_tokens_behind_the_first() -> None:
    found = by_kind(rows.result_rows([run("ours")], PLAN, "full", "ours"), "ours")
    assert found[rows.DECODE, "after the restart"]["median"] == 8.0


def test_other_work_on_the_machine_shows_as_a_share_of_the_replies() -> None:
    found = by_kind(rows.result_rows([run("ours")], PLAN, "full", "ours"), "ours")
    row = found[rows.WAITED, "after the restart"]
    assert row["median"] == pytest.approx((0.1 / 4.5 + 0.1 / 2.5) / 2, abs=1e-5)


def test_only_questions_that_the_full_cache_answers_count() -> None:
    full = run("full", (True, False, True, True, True))
    other = run("other", (False, True, True, False, True))
    found = by_kind(rows.result_rows([full, other], PLAN, "full", "full"), "other")
    assert (found[rows.RIGHT, "all"]["mean"], found[rows.RIGHT, "all"]["n"]) == (0.5, 4)
    assert found[rows.RIGHT, "before the restart"]["mean"] == 0.0
    assert found[rows.RIGHT, "after the restart"]["mean"] == 0.5
    assert found[rows.RIGHT, "all"]["asked"] == 5


def test_times_are_compared_with_the_same_turn_of_the_baseline() -> None:
    turns = tuple(turn(n, 10.0, started=1.0 if n in (2, 4) else None) for n in range(5))
    slow = PeerRun("slow", turns, {})
    found = by_kind(rows.result_rows([run("ours"), slow], PLAN, "ours", "ours"), "slow")
    assert found[rows.RESUMED, 2]["ratio"] == 2.5
    assert found[rows.RESUMED, 4]["ratio"] == 2.0
    assert found[rows.LAST, None]["ratio"] == 5.0
    assert found[rows.LAST, None]["ratio_to"] == "ours"


def test_a_peer_that_did_not_run_has_a_row_with_the_reason() -> None:
    (row,) = rows.result_rows([PeerRun("x", (), {}, "npm is not installed")], PLAN, "full", "ours")
    assert (row["metric"], row["reason"]) == ("not run", "npm is not installed")
    assert "npm is not installed" in rows.describe(row)


@pytest.mark.parametrize("metric", [rows.FIRST, rows.RIGHT, rows.RESUMED, rows.PEAK])
def test_every_row_can_be_printed(metric: str) -> None:
    found = rows.result_rows([run("ours")], PLAN, "full", "ours")
    assert any(metric in rows.describe(row) for row in found)


def test_a_peer_that_has_run_is_found_again_by_the_same_plan_only(tmp_path: Any) -> None:
    stored = run("ours, 1/4")
    store_run(tmp_path, PLAN, stored)
    assert find_run(tmp_path, PLAN, "ours, 1/4") == stored
    assert find_run(tmp_path, PLAN, "ours, 1/8") is None
    other = Plan("smollm2", (), 2, 4, 1000, 20, 0.0, 2)
    assert find_run(tmp_path, other, "ours, 1/4") is None
