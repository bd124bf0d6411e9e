"""Alerts of a real Prometheus over a real service that breaks: a killed worker, full files."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import until
from tests.end_to_end.conftest import chatter, new_server, user
from tests.operations.catalogue import ALERTS
from tests.operations.prometheus import Prometheus

__all__ = ["new_server"]


@pytest.fixture
def quick_rules(tmp_path: Path) -> Path:
    """The rules, with alerts that fire after two seconds of their condition."""
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "2s"
    file = tmp_path / "alerts.yml"
    file.write_text(yaml.safe_dump(rules), encoding="utf-8")
    return file


def test_a_killed_worker_fires_an_alert_until_it_is_back(
    new_cluster: Callable[..., Any], quick_rules: Path, tmp_path: Path
) -> None:
    cluster = new_cluster()
    cluster.start()
    jobs = {
        "kvrecall-gateway": [cluster.url.removeprefix("http://")],
        "kvrecall-worker": cluster.operations,
    }
    with Prometheus(tmp_path / "prometheus", jobs, quick_rules) as prometheus:
        until(lambda: prometheus.total("sum(kvrecall_worker_up)") == 2, "both workers are up")
        until(lambda: prometheus.firing() == {}, "silence")
        cluster.of_name["one"].end(signal.SIGKILL)
        until(lambda: "KvrecallWorkerDown" in prometheus.firing(), "the alert")
        assert prometheus.firing()["KvrecallWorkerDown"]["worker"] == "one"
        assert "KvrecallNoWorker" not in prometheus.firing()
        cluster.of_name["two"].end(signal.SIGKILL)
        until(lambda: "KvrecallNoWorker" in prometheus.firing(), "the alert of the last worker")
        cluster.back()
        until(lambda: prometheus.firing() == {}, "silence after both are back")
    cluster.kill()


def test_full_files_fire_the_alert_of_turns_that_are_not_durable(
    new_server: Callable[..., Any], quick_rules: Path, tmp_path: Path
) -> None:
    server = new_server(KVRECALL_STORE__NVME_BYTES="200000")
    server.start()
    jobs = {"kvrecall-gateway": [server.url.removeprefix("http://")]}
    with Prometheus(tmp_path / "prometheus", jobs, quick_rules) as prometheus:
        assert "KvrecallTurnsNotDurable" not in prometheus.firing()
        session = server.own.create_session(budget=128)
        turn = server.own.turn(session, [user(chatter(9, 60))], max_tokens=2)
        assert not turn.durable
        until(lambda: "KvrecallTurnsNotDurable" in prometheus.firing(), "the alert")
        assert prometheus.total("sum(kvrecall_worker_undurable_pages)") > 0
    server.kill()
