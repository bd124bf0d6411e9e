"""Call sites of the standard library: the answer is in the context, and not in the event."""

import re
from functools import partial

import pytest

from evals import harness
from evals.conditions import FULL, MATCHED, REPAIR
from evals.errors import BadExample
from evals.reporting.eval_plots import build_figure
from evals.suite import Record
from evals.suites.repository import suite as repository
from evals.suites.repository.examples import (
    REDACTED,
    CallSite,
    build_call_site,
    build_donor_event,
)
from evals.suites.repository.modules import load_modules
from evals.suites.repository.rows import CONTROL, CONTROLS, result_rows
from evals.suites.repository.suite import ANCHOR, COMPARED, GATED, TOOL_FILE, CodeCase
from kvrecall_server.reporting.results import Results
from reference import MODEL_PATH

TOKENS = 3000
SEEDS = range(4)


def characters(text: str) -> int:
    return len(text) // 3


@pytest.fixture(scope="module", params=SEEDS)
def site(request: pytest.FixtureRequest) -> CallSite:
    return build_call_site(request.param, TOKENS, characters)


@pytest.fixture(scope="module")
def found() -> list[Record]:
    return repository.run(CodeCase(str(MODEL_PATH), 1, TOKENS, (12, 24)))


def test_the_event_shows_the_lines_without_the_name(site: CallSite) -> None:
    assert not re.search(rf"\b{site.answer}\b", f"{site.event} {site.question}")
    assert REDACTED in site.event
    assert f"line {site.call.line}" in site.event
    shown = site.event.splitlines()[1:]
    for line in shown:
        assert line.replace(REDACTED, site.answer) in site.calling.listing


def test_the_context_has_the_call_and_one_definition_elsewhere(site: CallSite) -> None:
    assert re.search(rf"\b{site.answer}\b", site.calling.line(site.call.line))
    assert re.search(rf"\b(def|class) {site.answer}\b", site.defining.line(site.defined_on))
    named = [name for module in site.modules for name, _ in module.defined]
    assert named.count(site.answer) == 1
    assert site.unrelated not in (site.calling, site.defining)
    assert sum(characters(module.listing) for module in site.modules) <= TOKENS


def test_the_same_seed_gives_the_same_call_site(site: CallSite) -> None:
    seed = next(seed for seed in SEEDS if build_call_site(seed, TOKENS, characters) == site)
    assert build_call_site(seed, TOKENS, characters) == site
    event = build_donor_event(seed, site)
    assert REDACTED in event
    assert not any(module.name in event.splitlines()[0] for module in site.modules)


def test_only_the_name_itself_is_an_answer(site: CallSite) -> None:
    assert site.is_answered_by(f"`{site.answer}`.")
    assert not site.is_answered_by(f"{site.answer}s")
    other = next(
        name for module in site.modules for name, _ in module.defined if name != site.answer
    )
    assert not site.is_answered_by(f"{site.answer} or {other}")


def test_modules_are_those_of_the_running_python() -> None:
    names = [module.name for module in load_modules()]
    assert "bisect.py" in names
    assert names == sorted(names)


def test_a_context_too_small_for_modules_is_refused() -> None:
    with pytest.raises(BadExample, match="fit into 40 tokens"):
        build_call_site(1, 40, characters)


def test_conditions_have_the_same_rows_and_the_anchor_finds_the_name(found: list[Record]) -> None:
    for k in (12, 24):
        own = {each["condition"]: each for each in found if each["k"] == k}
        assert set(own) == set(COMPARED) - {FULL, "base"}
        assert len({each["active_rows"] for each in own.values()}) == 1
        assert own[ANCHOR]["held"] >= own[MATCHED]["held"]
        assert own[ANCHOR]["in_lines"] > 0.5
        assert own[TOOL_FILE]["budget"] == own[GATED]["budget"] == own[REPAIR]["budget"]
    full = next(each for each in found if each["condition"] == FULL)
    assert full["held"] == 1.0


def test_rows_name_the_best_control_and_measure_more_than_answers(found: list[Record]) -> None:
    rows = result_rows(found, 1)
    controls = [row for row in rows if row["condition"] == CONTROL]
    assert [row["k"] for row in controls] == [12, 24]
    assert all(row["control"] in CONTROLS for row in controls)
    measures = {row["measure"] for row in rows if "measure" in row}
    assert len(measures) == 3
    assert build_figure(Results("repository", "", 1, {}, {}, "model", rows)) is not None
    assert all(row["mean"] < 0 for row in rows if "log-probability" in row.get("measure", ""))


def test_k_is_the_papers_share_of_the_context() -> None:
    suite = repository.suite("none", 8192, 3, 2)
    assert [(unit.seed, unit.ks) for unit in suite.units] == [(3, (24, 48)), (4, (24, 48))]
    assert (
        repository.context_tokens(str(MODEL_PATH))
        == harness.load(str(MODEL_PATH)).model.max_context // 2
    )
    assert partial(result_rows, seed=3)([]) == suite.rows([])
