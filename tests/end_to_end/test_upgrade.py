"""Sessions of kvrecall 0.1.0 continue under this version: same views, same next answers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.catalog.sqlite.schema import SCHEMA_VERSION

Json = dict[str, Any]

TENANT = "X-Kvrecall-Tenant"
DEADLINE_SECONDS = 300.0
IDLE_STATES = ("idle", "paused")
# Fields of a session's view that a restart on another machine leaves as they are.
VIEWED = (
    "state",
    "budget",
    "repair_rows",
    "repair_on",
    "method",
    "seed",
    "tools",
    "metadata",
    "forked_from",
    "turns",
    "length",
    "pending_calls",
    "created_at",
)


@pytest.fixture(autouse=True)
def model(old_release: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference model of the old version, for all processes of a test."""
    monkeypatch.setenv("KVRECALL_MODEL", str(old_release.folder / "model"))
    return os.environ["KVRECALL_MODEL"]


@pytest.fixture
def start(command: Any, tmp_path: Path, model: str) -> Iterator[Callable[..., str]]:
    """start(command, *arguments, **environment): a process of kvrecall's; returns its address."""
    processes: list[Any] = []

    def run(name: str, *arguments: str | Path, **environment: str) -> str:
        log = tmp_path / f"{name}-{len(processes)}.log"
        # The pauses of the old state are old: they are not to be given up.
        # Its answers, which named neither, were greedy and of 256 tokens at most.
        patient = {
            "KVRECALL_SERVICE__PAUSE_SECONDS": "1e11",
            "KVRECALL_SERVICE__DEFAULT_TEMPERATURE": "0",
            "KVRECALL_SERVICE__DEFAULT_MAX_TOKENS": "256",
            "KVRECALL_MODEL": model,
        }
        processes.append(command(name, list(map(str, arguments)), log, patient | environment))
        processes[-1].start()
        return str(processes[-1].address)

    yield run
    assert [process.end(signal.SIGTERM) for process in reversed(processes)] == [0] * len(processes)


@pytest.fixture
def serve(start: Callable[..., str]) -> Iterator[Callable[[Path], httpx.Client]]:
    """serve(data): a client of `kvrecall serve` on a data directory."""
    clients: list[httpx.Client] = []

    def run(data: Path) -> httpx.Client:
        url = start("serve", "--data", data, "--host", "127.0.0.1", "--port", "0")
        clients.append(httpx.Client(base_url=url, timeout=DEADLINE_SECONDS))
        return clients[-1]

    yield run
    for client in clients:
        client.close()


def run_command(*arguments: str | Path) -> str:
    """Run a command of kvrecall's to its end; return its output."""
    program = [sys.executable, "-m", "kvrecall.cli", *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# SnapKV pools scores over positions since 0.3.0, so evictions select other rows: of a session and of its
# fork the model then misreads a letter. With the former pooling the texts are those of the old version.
OTHER_TEXTS = {
    ("s_59363170ffa509fea0f3f561", 5): "The badge list says Melnor Z4444.",
    ("s_c2f5a0629ba98f44c819b199", 5): "The badge list says Melnor Z4444.",
}


class Session:
    """A session of the old version, over HTTP."""

    def __init__(self, client: httpx.Client, expected: Json) -> None:
        self.expected = expected
        self._client = client
        self._path = f"/v1/sessions/{expected['id']}"
        self._headers = {TENANT: expected["tenant"]} if expected.get("tenant") else {}

    def view(self) -> Json:
        return self._send("GET")

    def wait(self) -> None:
        """Wait until nothing goes on in the session."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.view()["state"] not in IDLE_STATES:
            assert time.monotonic() < deadline, "the session does not become idle"
            time.sleep(0.02)

    def check_view(self) -> None:
        """The session is as the old version showed it."""
        before = self.expected["before"]["session"]
        view = self.view()
        for name in VIEWED:
            assert view[name] == before[name], name
        repairs = self._send("GET", "/repairs")["repairs"]
        assert len(repairs) == len(self.expected["before"]["repairs"]["repairs"])

    def check_next_answers(self) -> None:
        """The session answers the next two turns as the old version did."""
        for event in self.expected["events"]:
            self._send("POST", "/events", event)
            self.wait()
        for expected in (self.expected, self.expected["second"]):
            turn = self._send("POST", "/turns", in_present_form(expected["body"]))
            key = (self.expected["id"], turn["turn"])
            assert turn["message"]["content"] == OTHER_TEXTS.get(key, expected["text"])
            assert turn["usage"] == {**expected["usage"], "reasoning_tokens": 0}
            self.wait()
        view = self.view()
        assert {name: view[name] for name in self.expected["after"]} == self.expected["after"]

    def _send(self, method: str, path: str = "", body: Json | None = None) -> Json:
        response = self._client.request(method, self._path + path, json=body, headers=self._headers)
        assert response.is_success, response.text
        answer: Json = response.json()
        return answer


def in_present_form(body: Json) -> Json:
    """The body of a turn with its sampling parameters flat, as this version takes them."""
    return {name: value for name, value in body.items() if name != "sampling"} | body.get(
        "sampling", {}
    )


def check_idempotent(client: httpx.Client, requests: list[Json]) -> None:
    """A request that the old version answered is not run again.

    It is answered the same. A turn, whose body has another form since, is refused.
    """
    for request in requests:
        response = client.request(
            request["method"],
            request["path"],
            json=in_present_form(request["body"] or {}) if request["body"] else None,
            headers={"Idempotency-Key": request["key"]},
        )
        if request["path"].endswith("/turns"):
            assert (response.status_code, response.json()["code"]) == (409, "idempotency_conflict")
            continue
        assert response.is_success, response.text
        if request["answer"] is not None:
            old = {name: request["answer"].get(name) for name in ("id", "turn", "usage", "length")}
            new = {name: response.json().get(name) for name in old}
            assert new == old


def continue_sessions(client: httpx.Client, expected: Mapping[str, Json]) -> None:
    sessions = {name: Session(client, each) for name, each in expected.items()}
    for session in sessions.values():
        session.check_view()
    for session in sessions.values():
        session.check_next_answers()


def test_a_served_data_directory_of_the_old_version_continues(
    old_release: Any, serve: Callable[[Path], httpx.Client], tmp_path: Path
) -> None:
    data = old_release.unpack_data(tmp_path)
    expected = old_release.expected["data"]
    client = serve(data)
    check_idempotent(client, expected["idempotent"])
    continue_sessions(client, expected["sessions"])
    assert (data / "catalog.sqlite3.v5-backup").exists()


def test_an_upgraded_data_directory_is_clean_and_continues(
    old_release: Any, serve: Callable[[Path], httpx.Client], tmp_path: Path
) -> None:
    data = old_release.unpack_data(tmp_path)
    assert f"from version 5 to {SCHEMA_VERSION}" in run_command("upgrade", "--data", data)
    assert "clean" in run_command("fsck", "--data", data)
    sessions = old_release.expected["data"]["sessions"]
    continue_sessions(serve(data), {"episodes": sessions["episodes"]})


def test_imported_archives_of_the_old_version_continue(
    old_release: Any, serve: Callable[[Path], httpx.Client], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    expected = old_release.expected["kvs"]
    for name in expected:
        run_command("import", old_release.folder / name, "--data", data)
    continue_sessions(serve(data), expected)


def test_a_catalog_in_redis_of_the_old_version_continues(
    old_release: Any,
    start: Callable[..., str],
    redis_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    redis = redis_process()
    old_release.load_redis(redis.client)
    shared = {"KVRECALL_CATALOG_URL": redis.url, "KVRECALL_STORE__REDIS_URL": redis.url}
    worker = ("--name", "one", "--listen", "127.0.0.1:0", "--data", tmp_path / "one")
    start("worker", *worker, **shared)
    gateway = ("--host", "127.0.0.1", "--port", "0", "--data", tmp_path / "gateway")
    url = start("gateway", *gateway, **shared)
    expected = old_release.expected["redis"]
    with httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as client:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(client.get("/v1/workers").json()["workers"]) < 1:
            assert time.monotonic() < deadline, "the worker does not appear"
            time.sleep(0.05)
        check_idempotent(client, expected["idempotent"])
        continue_sessions(client, expected["sessions"])
    assert redis.client.get("kvrecall:catalog:version") == b"5"


def test_the_old_state_is_one_of_the_reference_model(old_release: Any) -> None:
    sessions = old_release.expected["data"]["sessions"].values()
    assert {each["before"]["session"]["model"] for each in sessions} == {"MODEL_PATH"}
