"""Dashboards: current, valid for Grafana, and complete; test_dashboards_live.py asks their queries."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvrecall.metrics.family import PREFIX
from observability.dashboards.boards import BOARDS, NOT_SHOWN
from observability.dashboards.grafana import render
from observability.dashboards.panel import Board
from tests.operations.catalogue import ROOT, get_all_series, get_families, get_family
from tests.operations.grafana import fill_in, find_expressions
from tests.operations.promql import find_selectors

Json = dict[str, Any]
FOLDER = ROOT / "observability" / "grafana" / "dashboards"
ALL = {"job": "a|b", "worker": "w", "instance": "i"}

register_default_plugins()


def load(board: Board) -> Json:
    dashboard: Json = json.loads((FOLDER / f"{board.name}.json").read_text(encoding="utf-8"))
    return dashboard


@pytest.fixture(params=BOARDS, ids=lambda board: board.name)
def board(request: pytest.FixtureRequest) -> Board:
    return request.param


@pytest.fixture
def dashboard(board: Board) -> Json:
    """The committed file."""
    return load(board)


def find_uids(value: Any) -> Iterator[str]:
    """Uids of all data sources, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("datasource"), dict):
            yield value["datasource"]["uid"]
        for inner in value.values():
            yield from find_uids(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from find_uids(inner)


def test_the_files_are_those_of_the_code() -> None:
    for board in BOARDS:
        text = (FOLDER / f"{board.name}.json").read_text(encoding="utf-8")
        assert text == render(board), "run: python -m observability.dashboards"
    assert {path.stem for path in FOLDER.iterdir()} == {board.name for board in BOARDS}


def test_grafanas_model_reads_a_file_back_to_the_same_json(dashboard: Json) -> None:
    read = Dashboard.from_json(json.loads(json.dumps(dashboard)))
    assert json.loads(JSONEncoder().encode(read)) == dashboard


def test_no_data_source_is_named(dashboard: Json) -> None:
    uids = list(find_uids(dashboard))
    assert len(uids) > 30
    assert set(uids) == {"${datasource}"}


def test_variables_links_and_time(board: Board, dashboard: Json) -> None:
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == [
        "datasource",
        "job",
        "worker",
        *(["instance"] if board.name == "workers" else []),
    ]
    assert dashboard["uid"] == f"kvrecall-{board.name}"
    assert dashboard["tags"] == ["kvrecall"]
    [link] = dashboard["links"]
    assert (link["tags"], link["includeVars"], link["keepTime"]) == (["kvrecall"], True, True)
    assert (dashboard["time"]["from"], dashboard["refresh"]) == ("now-1h", "30s")
    assert [each["name"] for each in dashboard["annotations"]["list"]] == [
        "New version",
        "Draining worker",
    ]


def test_panels_have_titles_units_and_advice_and_do_not_overlap(dashboard: Json) -> None:
    panels = dashboard["panels"]
    assert len(panels) <= 16
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        cells |= covered


def test_every_expression_asks_for_series_and_labels_that_exist(dashboard: Json) -> None:
    series = get_all_series()
    for title, expression in find_expressions(dashboard):
        for selector in find_selectors(fill_in(expression, ALL)):
            assert selector.series in series, f"{title}: {selector}"
            assert selector.labels <= series[selector.series], f"{title}: {selector}"


def test_every_expression_keeps_to_the_chosen_jobs_and_workers(dashboard: Json) -> None:
    series = get_all_series()
    for title, expression in find_expressions(dashboard):
        for selector in find_selectors(fill_in(expression, ALL)):
            assert "job" in selector.labels, f"{title}: {selector}"
            labels = series[selector.series]
            is_of_workers = "worker" in labels and selector.series != f"{PREFIX}worker_up"
            assert "worker" in selector.labels or not is_of_workers, f"{title}: {selector}"


def test_rates_use_the_interval_of_the_scrapes(dashboard: Json) -> None:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            ranges = re.findall(r"\[([^]]+)\]", target["expr"])
            assert set(ranges) <= {"$__rate_interval"}, panel["title"]


def test_every_metric_is_on_a_panel_or_listed_with_a_reason() -> None:
    shown = {
        get_family(selector.series)
        for board in BOARDS
        for _, expression in find_expressions(load(board))
        for selector in find_selectors(fill_in(expression, ALL))
    }
    listed = {PREFIX + name for name in NOT_SHOWN}
    assert not shown & listed
    assert get_families() - shown == listed
