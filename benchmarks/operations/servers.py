"""Serving processes of the benchmark: a gateway and a worker, a collector of traces, a scraper."""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.rig.ports import free_port
from kvrecall.app.local_server import STOP_SECONDS, launch
from reference import MODEL_PATH

SCRAPE_SECONDS = 1.0


@dataclass(frozen=True)
class Pair:
    """A gateway with one worker: the gateway's address, and those of both metrics pages."""

    gateway: str
    metrics: tuple[str, str]


def copy_endless_model(folder: Path) -> Path:
    """Copy the reference model without its end of turn."""
    copied = folder / "endless"
    shutil.copytree(MODEL_PATH, copied)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((copied / name).read_text(encoding="utf-8"))
        config["eos_token_id"] = config["pad_token_id"]
        (copied / name).write_text(json.dumps(config), encoding="utf-8")
    return copied


@contextmanager
def served(folder: Path, environment: Mapping[str, str]) -> Iterator[Pair]:
    """A gateway with one worker, whose port for operators is open."""
    folder.mkdir()
    operations = f"127.0.0.1:{free_port()}"
    options = ["--listen", "127.0.0.1:0", "--ops", operations, "--slots", "2", "--budget", "256"]
    worker_data, gateway_data = (str(folder / name) for name in ("worker", "gateway"))
    with (
        running("worker", [*options, "--data", worker_data], folder, environment) as worker,
        running(
            "gateway",
            ["--worker", worker, "--port", "0", "--data", gateway_data],
            folder,
            environment,
        ) as gateway,
    ):
        yield Pair(gateway, (f"{gateway}/metrics", f"http://{operations}/metrics"))


@contextmanager
def running(
    command: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Address of a serving command of kvrecall."""
    log = folder / f"{command}.log"
    both = {**os.environ, **environment}
    process, address = launch([*arguments, "--log", "json"], log, command, environment=both)
    with process:
        try:
            yield address
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


@contextmanager
def collecting() -> Iterator[tuple[str, list[int]]]:
    """Address of a collector that drops what it gets, and the sizes of what it got."""
    received: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(len(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def scraping(pages: Sequence[str]) -> Iterator[None]:
    """Read metrics pages each `SCRAPE_SECONDS`."""
    ended = threading.Event()

    def scrape() -> None:
        with httpx.Client(timeout=60) as http:
            while not ended.wait(SCRAPE_SECONDS):
                for page in pages:
                    http.get(page).raise_for_status()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        ended.set()
        scraper.join()
