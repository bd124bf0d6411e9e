"""Watch over the processes: no request may end one, make a worker unhealthy or log an error."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fuzz.findings import Findings, Problem
from benchmarks.fuzz.service import OPERATOR, Service
from faults.checks.latency import Prober, slow_health_checks

DOOR = "processes"
UP = "kvrecall_worker_up"
RETRIES = "kvrecall_turn_retries_total"
# Events of a gateway that lost a worker, which no request may cause.
LOST = ("worker left", "worker incompatible", "turn retried in another worker")
_SECONDS = 2.0
_PATIENCE = 60.0


class Watch:
    """Looks after a service from its start until `stop`."""

    def __init__(self, service: Service, findings: Findings) -> None:
        self._service = service
        self._findings = findings
        self._pids = list(service.setup.ids)
        self._over = threading.Event()
        self._prober = Prober(service.setup)
        self._thread = threading.Thread(target=self._watch)

    @property
    def alive(self) -> bool:
        """True while all processes of the start run."""
        return self._service.setup.ids == self._pids

    def start(self) -> None:
        """Start to look."""
        self._prober.start()
        self._thread.start()

    def stop(self) -> None:
        """End, and add what the processes' health checks and logs show."""
        self._over.set()
        self._thread.join()
        self._prober.stop()
        setup = self._service.setup
        if not self.alive:
            self._add("a process ended", f"{self._pids} ran at the start, {setup.ids} at the end")
        samples = self._prober.samples()
        self._findings.count_other("health checks", len(samples))
        for text in slow_health_checks(setup, samples):
            self._add(f"late health of {text.partition(':')[0]}", text)
        for server in setup.servers:
            for event, line in read_errors(server.log):
                self._add(f"{server.command} logged: {event}", line)

    def _watch(self) -> None:
        key = self._service.keys[OPERATOR]
        while not self._over.wait(_SECONDS):
            for text in _find_unhealthy(self._service.url, key):
                self._add("a worker that is not healthy", text)

    def _add(self, kind: str, seen: str) -> None:
        self._findings.add(DOOR, Problem(kind, seen))


def _find_unhealthy(url: str, key: str) -> Iterator[str]:
    """Yield what the gateway's metrics say of workers that it lost."""
    try:
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx.get(f"{url}/metrics", headers=headers, timeout=_PATIENCE).raise_for_status()
    except httpx.HTTPError as error:
        yield f"/metrics: {error!r}"
        return
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            lost = sample.name == UP and sample.value != 1.0
            if lost or (sample.name == RETRIES and sample.value):
                yield f"{sample.name} {sample.labels} is {sample.value:.0f}"


def read_errors(log: Path) -> Iterator[tuple[str, str]]:
    """Yield event and line of every error and lost worker in a log, and what is no line of it."""
    if not log.exists():
        return
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            members = json.loads(line)
        except ValueError:
            yield "a line that is no JSON", line
            continue
        failed = members.get("level") in ("error", "critical") or "exception" in members
        if failed or members.get("event") in LOST:
            # grpc's own events name the method in brackets.
            yield str(members.get("event")).partition(" [")[0], line
