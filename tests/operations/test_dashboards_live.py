"""Every query of every panel, asked as Grafana asks it, of a real service with real traffic."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.client import KvrecallClient
from observability.dashboards.boards import BOARDS
from observability.dashboards.panel import Board
from tests.conftest import RedisProcess, until
from tests.end_to_end.servers import SMALL_LIMITS
from tests.operations.catalogue import ROOT
from tests.operations.grafana import Json, fill_in, read_variables
from tests.operations.prometheus import Prometheus
from tests.operations.traffic import Traffic

FOLDER = ROOT / "observability" / "grafana" / "dashboards"
# Without data in a healthy service on a CPU: panel and legend. All others must have an answer.
EMPTY = {
    "overview": set(),
    "memory": {("Repairs cut, left out, failed", "failed: {{code}}")},
    "tiers": set(),
    "workers": {
        ("Device memory", "{{worker}} {{kind}}"),
        ("Takeovers and retries", "retry: {{code}}"),
        ("p95 of forks, moves, rebuilds", "rebuild"),
    },
}


@pytest.fixture(scope="module")
def live(
    new_cluster: Callable[..., Any],
    redis_processes: Callable[..., RedisProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SimpleNamespace]:
    """Two gateways and two workers on a Redis of their own, their traffic, and a Prometheus."""
    catalog = redis_processes()
    limits = {
        "KVRECALL_SERVICE__MAX_RUNNING_TURNS": "2",
        "KVRECALL_STORE__NVME_BYTES": str(1 << 30),
        "KVRECALL_STORE__REDIS_BYTES": str(1 << 30),
        "KVRECALL_CATALOG_URL": catalog.url,
        "KVRECALL_STORE__REDIS_URL": catalog.url,
    }
    cluster = new_cluster(**(SMALL_LIMITS | limits))
    cluster.start(gateways=2)
    urls = [gateway.address for gateway in cluster.gateways]
    jobs = {
        "kvrecall-gateway": [url.removeprefix("http://") for url in urls],
        "kvrecall-worker": cluster.operations,
    }
    with Prometheus(tmp_path_factory.mktemp("prometheus"), jobs) as prometheus:
        clients = [KvrecallClient(url, timeout_seconds=300) for url in urls]
        traffic = Traffic(clients, urls, catalog.client)
        for seed in (1, 2):
            traffic.run(seed)
            wait_until_scraped(prometheus, traffic.counted)
        yield SimpleNamespace(prometheus=prometheus, clients=clients, counted=traffic.counted)
        for client in clients:
            client.close()
    cluster.kill()


def wait_until_scraped(prometheus: Prometheus, counted: Counter[str]) -> None:
    """Wait until all processes were scraped after the last turn, and after a scrape before that."""
    until(
        lambda: prometheus.total("sum(kvrecall_turns_total)") == counted["turns"],
        "all turns are in Prometheus",
    )
    now = time.time()
    until(lambda: prometheus.total("min(timestamp(up))") > now, "another scrape of each process")


def has_data(series: list[Json]) -> bool:
    """True if a series has a number."""
    samples = [each.get("values") or [each["value"]] for each in series]
    return any(value != "NaN" for values in samples for _, value in values)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_of_a_dashboard_has_data(live: SimpleNamespace, board: Board) -> None:
    dashboard = json.loads((FOLDER / f"{board.name}.json").read_text(encoding="utf-8"))
    values = read_variables(live.prometheus, dashboard)
    now = time.time()
    empty = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = fill_in(target["expr"], values)
            at_once = live.prometheus.query(query)
            drawn = live.prometheus.ask("query_range", query=query, start=now - 60, end=now, step=2)
            if not (has_data(at_once) and has_data(drawn["result"])):
                empty.add((panel["title"], target["legendFormat"]))
    assert empty == EMPTY[board.name]


def test_a_query_that_asks_for_a_renamed_metric_has_none(live: SimpleNamespace) -> None:
    assert has_data(live.prometheus.query("sum(rate(kvrecall_turns_total[5m]))"))
    assert not has_data(live.prometheus.query("sum(rate(kvrecall_turn_total[5m]))"))


def test_annotations_of_versions_are_found(live: SimpleNamespace) -> None:
    file = FOLDER / "overview.json"
    versions, draining = json.loads(file.read_text(encoding="utf-8"))["annotations"]["list"]
    everything = {"job": ".+", "worker": ".+"}
    components = {
        series["metric"]["component"]
        for series in live.prometheus.query(fill_in(versions["expr"], everything))
    }
    assert components == {"gateway", "worker"}
    assert live.prometheus.query(fill_in(draining["expr"], everything)) == []


def test_sums_over_two_gateways_and_workers_are_the_true_numbers(live: SimpleNamespace) -> None:
    ask, counted = live.prometheus.total, live.counted
    assert ask("count(kvrecall_turns_limit{kind='running'})") == 2
    assert ask("sum(kvrecall_turns_total)") == counted["turns"]
    assert ask("min(sum by (instance) (kvrecall_turns_total))") > 0, "both gateways had turns"
    assert ask("sum(kvrecall_tokens_total{kind='output'})") == counted["output"]
    assert ask("sum(kvrecall_tokens_total{kind='prompt'})") == counted["prompt"]
    assert ask("sum(kvrecall_turn_seconds_count)") == counted["turns"]
    assert ask("sum(max by (worker) (kvrecall_worker_up))") == 2
    sessions = len(live.clients[0].list_sessions(limit=200).sessions)
    until(
        lambda: ask("sum(max by (state) (kvrecall_sessions))") == sessions,
        "the catalog's count of sessions, which gateways renew every 10 seconds",
    )
    loads = live.clients[0].workers()
    assert ask("sum(kvrecall_worker_slots)") == sum(load.slots for load in loads)
