"""A real Alertmanager, and a receiver that it sends alerts to."""

import json
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import httpx

from faults.rig.ports import free_port
from tests.conftest import until

Json = dict[str, Any]
# With what a shell or an editor of lines may stumble on.
PATH = "/alerts?team=kv&key=a%7Cb"


class Receiver:
    """A webhook that keeps the alerts it was sent. A context manager."""

    def __init__(self) -> None:
        self.alerts: list[Json] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._build_handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, name: str) -> list[Json]:
        """Return the alerts of a name, oldest first."""
        return [alert for alert in self.alerts if alert["labels"]["alertname"] == name]

    def _build_handler(self) -> type[BaseHTTPRequestHandler]:
        alerts = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_ours = self.path == PATH
                alerts.extend(json.loads(body)["alerts"] if is_ours else ())
                self.send_response(200 if is_ours else 404)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Handler


class Alertmanager:
    """Runs with a configuration file. A context manager."""

    def __init__(self, folder: Path, configuration: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "alertmanager.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus-alertmanager",
                    f"--config.file={configuration}",
                    f"--storage.path={folder / 'alertmanager'}",
                    f"--web.listen-address={self.address}",
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        until(self._is_ready, "Alertmanager is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text(encoding="utf-8")

    def find(self, name: str) -> list[Json]:
        """Return the active alerts of a name."""
        answer = httpx.get(f"http://{self.address}/api/v2/alerts", params={"active": True})
        alerts: list[Json] = answer.raise_for_status().json()
        return [alert for alert in alerts if alert["labels"]["alertname"] == name]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            return httpx.get(f"http://{self.address}/-/ready").is_success
        except httpx.TransportError:
            return False
