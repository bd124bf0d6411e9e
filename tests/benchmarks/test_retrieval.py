"""A step of retrieval at a small size, with every arm and its ratio."""

from benchmarks.retrieval import INDEXES, Plan, time_step


def test_a_step_is_timed_with_its_parts() -> None:
    rows = list(time_step(1000, Plan(rounds=2, budget=64)))
    metrics = {row["metric"]: row for row in rows}
    for index in INDEXES:
        assert {index, f"{index}: search", f"{index}: reading", f"{index}: attention"} <= set(
            metrics
        )
        assert metrics[f"full attention / {index}"]["n"] == 2
    assert all(row["median"] > 0 for row in rows)
