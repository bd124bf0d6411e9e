"""Time and size of a metrics page while the catalog has many sessions."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.operations.servers import copy_endless_model, served
from kvrecall.client import KvrecallClient
from kvrecall.reporting.results import Row, speed_row

SCRAPES = 30
TURNS = 20


def measure_scrapes(sessions: int, scrapes: int = SCRAPES) -> Iterator[Row]:
    """Rows of the gateway's page and of the worker's, with `sessions` in the catalog.

    The gateway counts its sessions every ten seconds: a scrape that counts is among those measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        environment = {"KVRECALL_MODEL": str(copy_endless_model(here)), "OMP_NUM_THREADS": "1"}
        with (
            served(here / "pair", environment) as pair,
            KvrecallClient(pair.gateway, timeout_seconds=300) as client,
            httpx.Client(timeout=60) as http,
        ):
            for number in range(sessions):
                session = client.create_session(budget=64, repair_rows=16, seed=number)
                if number < TURNS:
                    message = {"role": "user", "content": f"Hello, this is {number}."}
                    client.turn(session.id, [message], max_tokens=4)
            for name, page in zip(("gateway", "worker"), pair.metrics, strict=True):
                yield _measure_page(http, f"{name}, {sessions} sessions", page, scrapes)


def _measure_page(http: httpx.Client, name: str, page: str, scrapes: int) -> Row:
    seconds = []
    text = ""
    for _ in range(scrapes):
        began = time.perf_counter()
        text = http.get(page).raise_for_status().text
        seconds.append(time.perf_counter() - began)
        time.sleep(0.5)
    series = sum(len(family.samples) for family in text_string_to_metric_families(text))
    return speed_row(name, "scrape", "seconds", seconds, series=series)
