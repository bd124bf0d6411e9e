"""Rows of the benchmark of settling, from given measurements."""

from benchmarks.settling import DECODED, KL, PAUSE, TURN, Measurements, Plan, build_rows

PLAN = Plan(1, 1, 3, 2, 8, 64, 32, 0.7)


def test_times_to_the_first_token_are_compared_turn_by_turn() -> None:
    measured: Measurements = {
        arm: {
            KL: [0.25],
            "same first choice": [1.0],
            "right answers": [1.0, 0.0],
            "tokens before the answer": [40, 60],
            "tokens settled in the pause": [64.0] if arm == PAUSE else [],
            "first token": first,
        }
        for arm, first in ((PAUSE, [0.1, 0.2]), (TURN, [0.2, 0.6]), (DECODED, [0.1, 0.2]))
    }
    rows = {(row["condition"], row["metric"]): row for row in build_rows(measured, PLAN)}
    assert rows[TURN, "first token"]["ratio"] == 2.5
    assert rows[PAUSE, "first token"]["ratio"] == 1.0
    assert rows[PAUSE, "tokens settled in the pause"]["mean"] == 64
    assert (TURN, "tokens settled in the pause") not in rows
    assert rows[DECODED, "right answers"]["mean"] == 0.5
