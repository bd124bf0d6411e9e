"""The checks wait for the whole service, and count only the processes of their own set-up."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from faults.checks import events, leaks
from faults.rig.processes import processes_under, until
from faults.rig.setups import Rig, Setup, cluster

# What a gateway shows while a worker is gone, and when it is back.
GONE = """\
kvrecall_worker_up{worker="worker-1"} 1.0
kvrecall_worker_up{worker="worker-2"} 0.0
"""
BACK = GONE.replace("0.0", "1.0")
# What the worker itself shows.
HOLDS = """\
kvrecall_tier_bytes{tier="nvme",worker="worker-2"} 4096.0
"""
RELEASED = HOLDS.replace("4096.0", "0.0")


@dataclass
class MetricsPages:
    """Pages that a process serves at /metrics, one a request; the last one again and again."""

    pages: list[str]
    url: str = ""
    requests: int = 0

    def next(self) -> str:
        self.requests += 1
        return self.pages[min(self.requests, len(self.pages)) - 1]


@contextmanager
def serve(pages: Sequence[str]) -> Iterator[MetricsPages]:
    """Serve these pages."""
    served = MetricsPages(list(pages))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = served.next().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """A cluster of two workers that are not started."""
    made = cluster(tmp_path / "cluster", Rig(tmp_path / "model"))
    yield made
    made.close()


def test_zeros_without_the_counts_of_all_workers_prove_nothing(setup: Setup) -> None:
    with serve([GONE, BACK]) as gateway, serve([RELEASED, HOLDS, RELEASED]) as worker:
        setup.urls, setup.operations = [gateway.url], [worker.url]
        assert leaks.find_leaks_in_service(setup) == []
    assert gateway.requests == worker.requests == 3


def test_a_worker_that_shows_no_metrics_proves_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "LEAK_SECONDS", 0.0)
    with serve([BACK]) as gateway, serve([""]) as worker:
        setup.urls, setup.operations = [gateway.url], [worker.url]
        assert leaks.find_leaks_in_service(setup) == [f"{worker.url} gives no metrics"]


def test_a_rebuild_has_a_cause_where_a_worker_was_cut_off(setup: Setup) -> None:
    at = datetime.now(UTC)
    lines = [
        {"event": "pages rebuilt", "session": session, "pages": pages, "timestamp": when}
        for session, pages, when in (
            ("lost", [3, 4], at.isoformat()),
            ("moved", [1], (at - timedelta(hours=1)).isoformat()),
        )
    ]
    cut_off = at.timestamp() - 3600
    setup.cut_off.append((cut_off - 1, cut_off + 1))
    for server in setup.servers:
        server.log.parent.mkdir(parents=True, exist_ok=True)
        server.log.write_text("")
    setup.servers[0].log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert events.rebuilt_without_cause(setup) == {"lost": 2}
    assert events.rebuilt(setup) == {"lost": 2, "moved": 1}


def test_a_rebuild_of_a_state_that_another_session_dropped_has_a_cause(setup: Setup) -> None:
    at = datetime.now(UTC).isoformat()
    lines = [
        {"event": "pages rebuilt", "session": name, "pages": [], "states": own, "timestamp": at}
        for name, own in (("own", 1), ("fork", 0))
    ]
    for server in setup.servers:
        server.log.parent.mkdir(parents=True, exist_ok=True)
        server.log.write_text("")
    setup.servers[0].log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert events.rebuilt_without_cause(setup) == {"own": 1}
    assert list(events.rebuilt_without_cause(setup)) == ["own"]
    assert "fork" in events.rebuilt(setup), "its answers are compared as those of a rebuilt session"


def test_a_process_of_a_folder_with_a_longer_name_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "round-10").mkdir()
    script = tmp_path / "round-10" / "wait.py"
    script.write_text("input()")
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE) as process:
        until(lambda: processes_under(tmp_path / "round-10") == [process.pid], "the process runs")
        assert processes_under(tmp_path / "round-1") == []
        process.communicate(b"\n")
    assert processes_under(tmp_path / "round-10") == []


def test_events_are_counted_without_the_folders_of_the_machine(setup: Setup) -> None:
    lines = [{"event": f"loading {path}/endless", "level": "info"} for path in ("/a/b", "/c")]
    for server in setup.servers:
        server.log.parent.mkdir(parents=True, exist_ok=True)
        server.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert events.events(setup) == {"info loading endless": 2 * len(setup.servers)}
