"""A real Prometheus over processes of a test."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from faults.rig.ports import free_port
from tests.conftest import until

SCRAPE_SECONDS = 2

Json = dict[str, Any]


class PrometheusApi:
    """Questions to a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, path: str, **parameters: Any) -> Any:
        """Data of an answer; a refusal fails."""
        answer = self.http.get(f"/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[Json]:
        """Series of an instant query."""
        series: list[Json] = self.ask("query", query=expression)["result"]
        return series

    def total(self, expression: str) -> float:
        """Value of an expression with one series, 0 with none."""
        series = self.query(expression)
        assert len(series) <= 1, f"{expression}: {series}"
        return float(series[0]["value"][1]) if series else 0.0

    def firing(self) -> dict[str, Json]:
        """Labels of the firing alerts, by name."""
        return {
            alert["labels"]["alertname"]: alert["labels"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }


class Prometheus(PrometheusApi):
    """Scrapes `jobs` every 2 seconds, and evaluates `rules` as often. A context manager."""

    def __init__(
        self, folder: Path, jobs: Mapping[str, Sequence[str]], rules: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        interval = f"{SCRAPE_SECONDS}s"
        configuration = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(rules)] if rules is not None else [],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(targets)}]}
                for job, targets in jobs.items()
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        self._targets = sum(map(len, jobs.values()))
        self._start(folder, [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"])

    def _start(self, folder: Path, arguments: Sequence[str]) -> None:
        port = free_port()
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        super().__init__(f"http://127.0.0.1:{port}")

    def __enter__(self) -> Self:
        """Wait until all targets are up."""
        try:
            until(self._is_ready, "Prometheus is ready")
            until(lambda: self.count_up() == self._targets, "all targets are scraped")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus ended; see prometheus.log"
        try:
            return self.http.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def count_up(self) -> int:
        """Number of targets that answer."""
        return int(self.total("sum(up)"))
