"""The worker's port for operators."""

from collections.abc import Iterator

import httpx
import pytest

from kvrecall.metrics.page import MetricsPage
from workers.errors import CannotListen
from workers.metrics.catalogue import create_metrics
from workers.rpc.operations import OperationsServer


@pytest.fixture
def server() -> Iterator[OperationsServer]:
    """A server on any free port."""
    made = OperationsServer("127.0.0.1:0", MetricsPage("worker", "1", (create_metrics("a"),)))
    yield made
    made.close()


def test_a_worker_that_loads_its_model_is_alive_and_not_ready(server: OperationsServer) -> None:
    url = f"http://{server.address}"
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 503
    server.ready = lambda: True
    assert httpx.get(f"{url}/readyz").status_code == 200
    server.ready = lambda: False
    assert httpx.get(f"{url}/readyz").status_code == 503


def test_metrics_come_in_the_form_that_is_asked_for(server: OperationsServer) -> None:
    url = f"http://{server.address}/metrics"
    plain = httpx.get(url)
    assert plain.headers["content-type"].startswith("text/plain")
    assert 'kvrecall_worker_jobs{kind="turn",state="queued",worker="a"} 0.0' in plain.text
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert httpx.get(url, headers=accept).text.endswith("# EOF\n")


def test_other_paths_and_methods_are_refused(server: OperationsServer) -> None:
    url = f"http://{server.address}"
    assert httpx.get(f"{url}/").status_code == 404
    assert httpx.post(f"{url}/metrics").status_code == 405
    head = httpx.head(f"{url}/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0


def test_an_address_in_use_is_refused_with_what_to_do(server: OperationsServer) -> None:
    page = MetricsPage("worker", "1", ())
    with pytest.raises(CannotListen, match="choose another --ops"):
        OperationsServer(server.address, page)
    with pytest.raises(CannotListen, match="choose another --ops"):
        OperationsServer("127.0.0.1:no-port", page)
