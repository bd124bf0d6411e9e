"""ChunkSummaries against numbers worked out by hand."""

from typing import Any

import pytest

from evals.suites.longconv.rows import prefill_seconds, result_rows
from evals.summary import difference_row, group_by, mean_row, split_cells, values_by_key


def question(
    config: str, budget: str, number: int, right: float, place: str = "early", **more: float
) -> dict[str, object]:
    columns = {
        "kind": "question",
        "codec": "raw",
        "arm": config,
        "budget": budget,
        "seed": 1,
        "question": number,
        "place": place,
    }
    return {**columns, "right": right, "seconds": 0.5, **more}


def history(config: str, budget: str, rows: int, episodes: str = "none", **seconds: float) -> Any:
    sizes = {"episodes": 4, "index_bytes": 12, "copy_bytes": 1200} if episodes != "none" else {}
    columns = {
        "kind": "history",
        "codec": "raw",
        "arm": config,
        "budget": budget,
        "seed": 1,
        "rows": rows,
        **sizes,
    }
    return {
        **columns,
        "active_rows": rows,
        "stored_bytes": 640,
        "build": episodes,
        "seconds": seconds,
    }


def test_a_mean_row_has_the_mean_and_an_interval_around_it() -> None:
    (row,) = mean_row("all", [0.0, 1.0, 1.0, 1.0], 0, method="m")
    assert (row["condition"], row["method"], row["mean"], row["n"]) == ("all", "m", 0.75, 4)
    assert 0.0 < row["ci_low"] < 0.75 < row["ci_high"] <= 1.0
    assert mean_row("all", [0.0, 1.0, 1.0, 1.0], 0, method="m") == [row]
    assert mean_row("none", [], 0) == []


def test_a_difference_is_paired_over_the_questions_that_both_were_asked() -> None:
    ours = {("a",): 1.0, ("b",): 0.0, ("c",): 1.0, ("only ours",): 0.0}
    theirs = {("c",): 0.5, ("b",): 0.0, ("a",): 0.0}
    (row,) = difference_row("ours minus theirs", ours, theirs, 0)
    assert (row["mean"], row["n"]) == (0.5, 3)


def test_equal_differences_leave_no_width_however_the_questions_differ() -> None:
    ours = {(n,): float(n) for n in range(10)}
    (row,) = difference_row("d", ours, {key: value - 0.25 for key, value in ours.items()}, 0)
    assert (row["ci_low"], row["mean"], row["ci_high"]) == (0.25, 0.25, 0.25)


def test_records_are_grouped_in_order() -> None:
    records = [{"a": 2, "v": 1.0}, {"a": 1, "v": 2.0}, {"a": 2, "v": 3.0}]
    assert list(group_by(records, "a")) == [(2,), (1,)]
    assert values_by_key(records[:2], lambda each: each["v"], "a") == {(2,): 1.0, (1,): 2.0}


def test_longconv_counts_answers_by_config_budget_and_place() -> None:
    records = [
        history("snapkv", "1/4", 100, prefill=2.0),
        question("snapkv", "1/4", 0, 1.0),
        question("snapkv", "1/4", 1, 0.0, "late"),
        question("snapkv", "1/4", 2, 0.0, "late"),
    ]
    rows = {row["condition"]: row for row in result_rows(records, 0) if "mean" in row}
    assert set(rows) == {"all facts", "early facts", "late facts"}
    assert rows["all facts"]["mean"] == pytest.approx(1 / 3, abs=1e-4)
    assert (rows["late facts"]["mean"], rows["late facts"]["n"]) == (0.0, 2)
    assert (
        rows["all facts"]["budget"],
        rows["all facts"]["share"],
        rows["all facts"]["active_rows"],
    ) == (100, "1/4", 100.0)


def test_longconv_compares_episodes_with_others_at_the_same_budget_and_the_full_cache() -> None:
    episodic: dict[str, Any] = {"episode": 0, "held": 1.0, "rows_moved": 30, "rows_kept": 70}
    records = [
        history("full", "1/1", 400, prefill=1.0),
        *(question("full", "1/1", n, 1.0) for n in range(2)),
        history("snapkv", "1/4", 100, prefill=1.0),
        *(question("snapkv", "1/4", n, 0.0) for n in range(2)),
        history("snapkv", "1/8", 50, prefill=1.0),
        *(question("snapkv", "1/8", n, 0.0) for n in range(2)),
        history(
            "epicache+one_pass", "1/4", 100, "one_pass", prefill=1.0, clustering=9.0, build=0.5
        ),
        *(question("epicache+one_pass", "1/4", n, float(n), **episodic) for n in range(2)),
        history(
            "epicache+per_episode",
            "1/4",
            100,
            "per_episode",
            prefill=1.0,
            clustering=9.0,
            build=6.0,
        ),
        *(question("epicache+per_episode", "1/4", n, 1.0, **episodic) for n in range(2)),
    ]
    rows = result_rows(records, 0)
    against = {(row["method"], row["against"]): row["mean"] for row in rows if "against" in row}
    one = "epicache+one_pass"
    each = "epicache+per_episode"
    assert against == {
        (one, "full"): -0.5,
        (one, "snapkv"): 0.5,
        (one, each): -0.5,
        (each, "full"): 0.0,
        (each, "snapkv"): 1.0,
        (each, one): 0.5,
    }
    speed = {(row["condition"], row["metric"]): row for row in rows if "metric" in row}
    built = speed[f"{one}, 1/4", "prefill and build"]
    assert (built["median"], built["ratio_to"], built["ratio"]) == (1.5, each, 0.25)
    alike = speed[f"{one}, 1/4", "one of the E passes, and build"]
    assert (alike["median"], alike["ratio"]) == (6.0 / 4 + 0.5, pytest.approx(2 / 6, abs=1e-4))
    assert speed[f"{one}, 1/4", "build alone"]["ratio"] == pytest.approx(0.5 / 6, abs=1e-4)
    index = speed[f"{one}, 1/4", "index of all episodes"]
    assert (index["median"], index["ratio"]) == (12, 0.01)
    assert speed[f"{one}, 1/4", "rows moved by a switch"]["median"] == 0.3


def test_epicaches_own_build_does_not_count_a_prefill_it_does_not_need() -> None:
    assert prefill_seconds(history("e", "1/4", 1, "one_pass", prefill=2.0, build=0.5)) == 2.5
    assert prefill_seconds(history("e", "1/4", 1, "per_episode", prefill=2.0, build=8.0)) == 8.0
    assert prefill_seconds(history("s", "1/4", 1, "none", prefill=2.0)) == 2.0


def test_a_cell_without_a_full_cache_above_chance_is_listed_and_not_reported() -> None:
    records = [
        {"cell": cell, "arm": arm, "right": right}
        for cell, arm, rights in (
            ("early", "full", (1.0, 1.0, 1.0, 0.0)),
            ("early", "snapkv", (0.0, 0.0, 1.0, 0.0)),
            ("late", "full", (0.0, 0.0, 1.0, 0.0)),
            ("late", "snapkv", (1.0, 1.0, 1.0, 1.0)),
        )
        for right in rights
    ]
    kept, (row,) = split_cells(
        records, lambda each: each["arm"] == "full", ("cell",), lambda each: 0.2, 0
    )
    assert {each["cell"] for each in kept} == {"early"}
    assert len(kept) == 8
    assert (row["cell"], row["mean"], row["n"], row["chance"]) == ("late", 0.25, 4, 0.2)
    assert row["unreported"] is True
    assert "late" in row["condition"]


def test_cells_without_a_full_cache_are_reported() -> None:
    records = [{"cell": "early", "arm": "snapkv", "right": 0.0}]
    kept, rows = split_cells(
        records, lambda each: each["arm"] == "full", ("cell",), lambda each: 0.2, 0
    )
    assert (kept, rows) == (records, [])
