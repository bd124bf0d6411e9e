"""Turns of long sessions, in small."""

from benchmarks.long_turns import Plan, build_rows


def test_turns_of_a_session_behind_the_window_of_made_up_rows() -> None:
    plan = Plan(lengths=(17_000, 20_000), turns=2, answer=4, budget=96)
    rows = {(row["condition"], row["metric"], row["unit"]): row for row in build_rows(plan)}
    assert {name for _, name, _ in rows} == {
        "resumed to the first token",
        "turn",
        "its prompt",
        "search and attention of its answer",
        "all else",
        "rows and index on the host",
        "slot on the device",
    }
    short, long = ("17,000 tokens", "20,000 tokens")
    on_host, on_device = ("rows and index on the host", "bytes"), ("slot on the device", "bytes")
    # Whole pages of a session are held once, and its slot has the size of its budget.
    assert 1.15 < rows[long, *on_host]["ratio"] < 1.2
    assert rows[long, *on_device]["ratio"] == 1.0
    assert rows[short, "turn", "CPU seconds"]["n"] == 2
    assert rows[long, "turn", "CPU seconds"]["ratio_to"] == short
