"""The other suites of MQ-NIAH, each on one small example."""

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from evals.conditions import CONDITIONS, FULL, MATCHED, OLDEST, RANDOM, REPAIR, SPREAD
from evals.errors import BadSuite
from evals.reporting.eval_plots import build_figure
from evals.reporting.eval_tables import build_tables
from evals.suite import Record
from evals.suites.mq_niah import anytime as mq_niah_anytime
from evals.suites.mq_niah import policies as mq_niah_policies
from evals.suites.mq_niah import revisit as mq_niah_revisit
from evals.suites.mq_niah.anytime import Anytime
from evals.suites.mq_niah.case import Protocol
from evals.suites.mq_niah.revisit import CARRIED_ON, SCHEDULE, Revisit
from evals.suites.mq_niah.rows import result_rows
from evals.suites.mq_niah.suite import Frontier
from evals.suites.mq_niah.suite import run as run_frontier
from evals.suites.mq_niah.variants import SuiteRequest, build_suite
from kvrecall_server.reporting.figures import svg
from kvrecall_server.reporting.results import Results, Row
from reference import MODEL_PATH

SMALL = Protocol(str(MODEL_PATH), 4, "1/6", 700, 2)


@pytest.fixture(scope="module")
def revisited() -> list[Record]:
    protocol = Protocol(str(MODEL_PATH), 8, "1/6", 900, 1)
    return mq_niah_revisit.run(Revisit(protocol, 5, 16))


def test_named_conditions_run_beside_the_full_cache_all_without_a_name() -> None:
    request = SuiteRequest(("4q",), (16,), 0, 1)
    (unit,) = build_suite(SMALL, replace(request, conditions=(SPREAD, MATCHED))).units
    assert unit.conditions == (FULL, MATCHED, SPREAD)
    (unit,) = build_suite(SMALL, request).units
    assert unit.conditions == tuple(CONDITIONS)
    with pytest.raises(BadSuite, match="no condition 'best'"):
        build_suite(SMALL, replace(request, conditions=("best",)))


def test_no_turn_repeats_needles_of_the_last_one_nor_do_later_ones_ask_for_the_latest() -> None:
    assert all(not set(last) & set(numbers) for last, numbers in pairwise(SCHEDULE))
    assert all(not set(numbers) & {7, 8} for numbers in SCHEDULE[1:])


def test_every_turn_starts_from_the_same_budget(revisited: list[Record]) -> None:
    for condition in (MATCHED, REPAIR, SPREAD, CARRIED_ON):
        own = [each for each in revisited if each["condition"] == condition]
        assert [each["turn"] for each in own] == [2, 3, 4, 5]
        assert len({each["budget"] for each in own}) == 1
    full = [each["right"] for each in revisited if each["condition"] == FULL]
    assert sum(full) / len(full) > 0.9


def test_a_swap_that_is_carried_on_never_has_more_rows_than_the_base(
    revisited: list[Record],
) -> None:
    bound = {
        each["turn"]: each["active_rows"] - 16 for each in revisited if each["condition"] == SPREAD
    }
    carried = {
        each["turn"]: each["active_rows"] for each in revisited if each["condition"] == CARRIED_ON
    }
    assert all(carried[turn] <= bound[turn] for turn in bound)


def draw(suite: str, rows: Sequence[Row]) -> str:
    """Text of the suite's tables; its figure is drawn as well."""
    results = Results(suite, "", 5, {}, {}, "model", rows)
    figure = build_figure(results)
    assert figure is not None
    assert svg(figure).startswith("<svg")
    console = Console(width=200, record=True, quiet=False, file=io.StringIO())
    for table in build_tables(results):
        console.print(table)
    return console.export_text()


def test_suites_are_drawn_and_listed(revisited: list[Record]) -> None:
    text = draw("mq-niah revisit", mq_niah_revisit.result_rows(revisited, 5))
    assert CARRIED_ON in text
    assert "across: turn" in text
    units = mq_niah_policies.suite(SMALL, (8, 48), 5, 1).units
    assert {unit.protocol.policy for unit in units} == set(mq_niah_policies.POLICIES)
    protocols = [SMALL, Protocol(SMALL.model, 4, SMALL.base, SMALL.tokens, 2, "oldest")]
    found = [
        record
        for protocol in protocols
        for record in run_frontier(
            Frontier(protocol, 5, "14→23", (16,), (MATCHED, RANDOM, OLDEST, REPAIR, SPREAD))
        )
    ]
    assert "oldest" in draw("mq-niah policies", result_rows(found, 5))


def test_means_of_a_revisit_count_examples_not_turns(revisited: list[Record]) -> None:
    rows = mq_niah_revisit.result_rows(revisited, 5)
    assert all(row["n"] == 1 for row in rows if "mean" in row)
    assert {row["turn"] for row in rows if "turn" in row} == {2, 3, 4, 5}


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "scissorhands"])
def test_other_first_stages_fill_the_same_budget(policy: str) -> None:
    protocol = Protocol(SMALL.model, 4, SMALL.base, SMALL.tokens, 2, policy)
    found = run_frontier(Frontier(protocol, 5, "14→23", (16,), (MATCHED, SPREAD)))
    assert found[0]["active_rows"] == found[1]["active_rows"]
    assert {each["policy"] for each in found} == {policy}


def test_a_repair_that_is_stopped_later_scores_more_until_it_is_complete() -> None:
    found = mq_niah_anytime.run(Anytime(SMALL, 5, "14→23", 16))
    stopped = [each for each in found if each["kind"] == "stopped"]
    for condition in (REPAIR, SPREAD):
        own = [each for each in stopped if each["condition"] == condition]
        shares = [each["scanned"] for each in own]
        assert shares == sorted(shares)
        assert own[-1]["complete"]
        assert own[0]["overlap"] == 0.0
    text = draw("mq-niah anytime", mq_niah_anytime.result_rows(found, 5))
    assert "evicted tokens scored" in text
    timed = [each["condition"] for each in found if each["kind"] == "timed"]
    assert timed == [
        MATCHED,
        REPAIR,
        SPREAD,
        "Refresh, in spread's time",
        "page summary, in spread's time",
    ]
    assert all(each["active_rows"] <= each["budget"] + 100 for each in found)
