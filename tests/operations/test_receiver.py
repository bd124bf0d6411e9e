"""A firing alert reaches a webhook where one is set, by Prometheus' and Alertmanager's own files."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from faults.rig.ports import free_port
from tests.conftest import until
from tests.operations.alertmanager import Alertmanager, Receiver
from tests.operations.catalogue import ALERTS, ROOT
from tests.operations.compose import read_compose
from tests.operations.prometheus import PrometheusApi

ALERT = "KvrecallGatewayDown"
SECRETS = {"KVRECALL_API_KEY": "key-for-tests", "KVRECALL_WORKER_TOKEN": "token-for-tests-0123"}
RUNBOOKS = "https://docs.example.org/kvrecall/"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def write_alertmanager(folder: Path, webhook: str) -> Path:
    """Run the script of operators with a line of .env; the configuration that it writes."""
    (folder / ".env").write_text(f"KVRECALL_ALERTS_WEBHOOK={webhook}\n", encoding="utf-8")
    subprocess.run([ROOT / "deploy" / "secrets.sh", folder], check=True, capture_output=True)
    return folder / "deploy" / "secrets" / "alertmanager.yml"


@contextmanager
def alerting_prometheus(
    folder: Path, alertmanager: Alertmanager, runbooks: str
) -> Iterator[PrometheusApi]:
    """Prometheus with the deployment's file, arguments and variables, of a gateway that is down."""
    service = read_compose(SECRETS | {"KVRECALL_RUNBOOKS": runbooks})["services"]["prometheus"]
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        # Longer than until the first scrape, some 6 s: a gateway without any is down as well.
        group["rules"] = [{**rule, "for": "12s"} for rule in group["rules"] if "for" in rule]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    configuration = yaml.safe_load(ALERTS.with_name("prometheus.yml").read_text(encoding="utf-8"))
    configuration["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["alerting"]["alertmanagers"] = [
        {"static_configs": [{"targets": [alertmanager.address]}]}
    ]
    configuration["scrape_configs"] = [
        {
            "job_name": "kvrecall-gateway",
            "static_configs": [{"targets": [f"127.0.0.1:{free_port()}"]}],
        }
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    arguments = [each for each in service["command"] if "enable-feature" in each]
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                *arguments,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            env=service["environment"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield PrometheusApi(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def test_a_firing_alert_reaches_the_webhook_with_a_link_to_its_runbook(
    tmp_path: Path, receiver: Receiver
) -> None:
    configuration = write_alertmanager(tmp_path, receiver.url)
    with (
        Alertmanager(tmp_path, configuration) as alertmanager,
        alerting_prometheus(tmp_path, alertmanager, RUNBOOKS),
    ):
        until(lambda: receiver.find(ALERT), "the alert")
    alert = receiver.find(ALERT)[0]
    assert alert["status"] == "firing"
    assert alert["annotations"]["runbook_url"] == (
        f"{RUNBOOKS}docs/operations.md#kvrecallgatewaydown"
    )
    assert "runbooks" not in alert["labels"]


@pytest.mark.parametrize("webhook", ["", "''"])
def test_without_a_webhook_alerts_stay_in_alertmanager_and_nothing_fails(
    tmp_path: Path, receiver: Receiver, webhook: str
) -> None:
    configuration = write_alertmanager(tmp_path, webhook)
    assert configuration.read_text() == ALERTS.with_name("alertmanager.yml").read_text()
    with (
        Alertmanager(tmp_path, configuration) as alertmanager,
        alerting_prometheus(tmp_path, alertmanager, ""),
    ):
        until(lambda: alertmanager.find(ALERT), "the alert")
        time.sleep(2)  # a critical alert is sent at once
        assert "level=error" not in alertmanager.log
        assert "level=warn" not in alertmanager.log
        (alert,) = alertmanager.find(ALERT)
    assert receiver.alerts == []
    assert alert["annotations"]["runbook_url"] == "docs/operations.md#kvrecallgatewaydown"
