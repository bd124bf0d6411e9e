"""Alerts: rules and their unit tests pass, ask only for series that exist, and have runbooks."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify

from tests.operations.catalogue import ALERTS, ROOT, get_all_series
from tests.operations.promql import Selector, find_selectors

Json = dict[str, Any]
RULES = [
    rule
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTING = [rule for rule in RULES if "alert" in rule]
UNIT_TESTS = sorted((Path(__file__).parent / "rules").glob("*.yml"))
PROMETHEUS = ALERTS.with_name("prometheus.yml")


def run(*command: str | Path) -> str:
    """Output of a tool, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in run("promtool", "check", "rules", ALERTS)


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    secret = tmp_path / "api-key"
    secret.write_text("a-single-key")
    text = PROMETHEUS.read_text(encoding="utf-8")
    assert "/run/secrets/kvrecall-api-key" in text
    (tmp_path / "prometheus.yml").write_text(
        text.replace("/run/secrets/kvrecall-api-key", str(secret))
    )
    (tmp_path / "alerts.yml").write_bytes(ALERTS.read_bytes())
    assert "SUCCESS" in run("promtool", "check", "config", tmp_path / "prometheus.yml")


def test_the_alertmanagers_example_is_valid() -> None:
    assert "SUCCESS" in run("amtool", "check-config", ALERTS.with_name("alertmanager.yml"))


@pytest.mark.parametrize("tests", UNIT_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_unit_tests(tests: Path) -> None:
    assert "SUCCESS" in run("promtool", "test", "rules", tests)


def test_every_alert_has_unit_tests_of_firing_and_of_silence() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for check in test["alert_rule_test"]:
                fires[check["alertname"]].add(bool(check["exp_alerts"]))
    assert fires == {rule["alert"]: {True, False} for rule in ALERTING}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_only_for_series_and_labels_that_exist(rule: Json) -> None:
    series = get_all_series()
    selectors = find_selectors(rule["expr"])
    assert selectors
    for selector in selectors:
        assert selector.labels <= series[selector.series], selector


def test_unknown_labels_of_an_expression_are_found() -> None:
    expression = 'sum by (le, b) (rate(x_bucket{c="1"}[5m])) / on (b) max by (b) (y)'
    assert find_selectors(expression) == [
        Selector("x_bucket", frozenset({"le", "b", "c"})),
        Selector("y", frozenset({"b"})),
    ]
    for lost in ("sum by (b) (x) / on (c) y", "histogram_quantile(0.9, sum by (b) (x_bucket))"):
        with pytest.raises(AssertionError, match="are not labels of"):
            find_selectors(lost)


@pytest.mark.parametrize("rule", ALERTING, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_where_its_runbook_is(rule: Json) -> None:
    assert rule["alert"].startswith("Kvrecall")
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    before, path = rule["annotations"]["runbook_url"].rsplit(" ", 1)
    assert before == "{{ $externalLabels.runbooks"
    page, anchor = path.removeprefix("}}").split("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in [slugify(heading, "-") for heading in headings]
    assert anchor == rule["alert"].lower()
