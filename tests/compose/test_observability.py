"""Prometheus and Alertmanager of the compose file: targets, the dashboards' queries, an alert that arrives."""

import json
import time

import httpx
import pytest
import yaml

from kvrecall.client import KvrecallClient, ServiceProblem
from observability.dashboards.boards import BOARDS
from observability.dashboards.panel import Board
from tests.compose.conversations import begin
from tests.compose.stack import Stack
from tests.conftest import until
from tests.end_to_end.servers import DEADLINE_SECONDS
from tests.operations.catalogue import ROOT
from tests.operations.grafana import fill_in, find_expressions, read_variables
from tests.operations.prometheus import PrometheusApi

ALERTS = ROOT / "observability" / "prometheus" / "alerts.yml"
FOLDER = ROOT / "observability" / "grafana" / "dashboards"
JOBS = {"kvrecall-gateway", "kvrecall-worker"}


@pytest.fixture
def scraped(client: KvrecallClient, prometheus: PrometheusApi) -> None:
    """A turn that Prometheus has of both jobs."""
    begin(client, 10)
    until(
        lambda: prometheus.total("sum(kvrecall_turns_total)") > 0, "the gateway", DEADLINE_SECONDS
    )
    until(lambda: prometheus.query("kvrecall_worker_slots") != [], "the worker", DEADLINE_SECONDS)


def test_every_gateway_and_worker_is_scraped(prometheus: PrometheusApi) -> None:
    def jobs() -> set[str]:
        return {series["metric"]["job"] for series in prometheus.query("up == 1")}

    until(lambda: jobs() == JOBS, "both jobs", DEADLINE_SECONDS)


def test_prometheus_evaluates_every_alert(prometheus: PrometheusApi) -> None:
    def read_rules() -> dict[str, str]:
        groups = prometheus.ask("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    written = {rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]}
    until(lambda: read_rules() == dict.fromkeys(written, "ok"), "all rules", DEADLINE_SECONDS)


@pytest.mark.usefixtures("scraped")
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_prometheus_answers_every_query_of_a_dashboard(
    prometheus: PrometheusApi, board: Board
) -> None:
    dashboard = json.loads((FOLDER / f"{board.name}.json").read_text(encoding="utf-8"))
    values = read_variables(prometheus, dashboard)
    now = time.time()
    with_data = 0
    for _, expression in find_expressions(dashboard):
        query = fill_in(expression, values)
        with_data += bool(prometheus.query(query))
        prometheus.ask("query_range", query=query, start=now - 60, end=now, step=5)
    assert with_data > 0


def test_an_alert_arrives_at_alertmanager_once_all_workers_are_gone(
    stack: Stack, client: KvrecallClient
) -> None:
    conversation, twin = (begin(client, 11) for _ in range(2))
    expected = twin.ask()
    stack.compose("stop", "worker")
    try:
        with pytest.raises(ServiceProblem) as refused:
            conversation.ask()
        assert refused.value.status == 503
        until(lambda: "KvrecallNoWorker" in find_alerts(stack), "the alert", DEADLINE_SECONDS)
    finally:
        stack.scale(1)
    until(client.ready, "a worker", DEADLINE_SECONDS)
    assert conversation.ask().text == expected.text
    until(lambda: "KvrecallNoWorker" not in find_alerts(stack), "its end", DEADLINE_SECONDS)


def find_alerts(stack: Stack) -> set[str]:
    """Names of the alerts that Alertmanager has."""
    answer = httpx.get(f"{stack.url('alertmanager')}/api/v2/alerts", params={"active": True})
    return {alert["labels"]["alertname"] for alert in answer.raise_for_status().json()}
