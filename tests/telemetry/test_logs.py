"""Logs of real processes: every line is JSON, both sides of the wire agree, and no secret is there."""

import json
import logging
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.observation.identity import digest_tenant
from kvrecall_server.app.logs import LogHandler, adopt_loggers, redact, set_up_logs
from tests.end_to_end.servers import DEADLINE_SECONDS, Json, Process
from tests.telemetry.conftest import LIMITS, WORKER, Pair, ask, call_tool, read_lines

TEXT = "zebra quartz falconry"
RESULT = "the marmalade is in the cupboard"
TENANT = "gooseberry-industries"
PASSWORD = "swordfish-of-the-catalog"
TOKEN = "turnstile-between-processes"
KEY = "kvr-0123456789abcdef-" + "f" * 32
SECRETS = ("quartz", "marmalade", "cupboard", "gooseberry", "swordfish", "turnstile", "f" * 16)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {
    "X-Kvrecall-Tenant": TENANT,
    "Authorization": f"Bearer {KEY}",
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
}
Logs = dict[str, list[Json]]


def converse(url: str) -> str:
    """Run turns, a stream, a pause, probes and mistakes; returns the session."""
    with httpx.Client(base_url=url, headers=HEADERS, timeout=DEADLINE_SECONDS) as http:
        settings = {
            "budget": 128,
            "research": {"method": "snapkv", "repair_rows": 32},
            "seed": 7,
            "metadata": {"note": TEXT},
        }
        session = http.post("/v1/sessions", json=settings).raise_for_status().json()["id"]
        turns = f"/v1/sessions/{session}/turns"
        body: Json = {"messages": [ask(f"{TEXT} " * 30)], "max_tokens": 8}
        http.post(turns, json=body, headers={"x-request-id": "first-turn"}).raise_for_status()
        streamed = http.post(turns, json={**body, "stream": True}).raise_for_status()
        assert "event: done" in streamed.text
        pause = {"messages": [ask(TEXT), call_tool("c1", name=TEXT)], "generate": False}
        http.post(turns, json=pause).raise_for_status()
        for event in (
            {"type": "tool_call.started", "call_id": "c1"},
            {"type": "tool_call.completed", "call_id": "c1", "result": RESULT},
        ):
            http.post(f"/v1/sessions/{session}/events", json=event).raise_for_status()
        http.post(turns, json={"messages": [], "max_tokens": 4}).raise_for_status()
        for path in ("/healthz", "/readyz", "/metrics"):
            http.get(path).raise_for_status()
        assert http.post(turns, json={"messages": TEXT}).status_code == 422
        assert http.post(turns, json={"messages": []}).status_code == 422
        assert http.get(f"/v1/sessions/{TEXT}").status_code == 404
        assert http.get(f"/{KEY}?{TEXT}").status_code == 404
    return str(session)


@pytest.fixture(scope="module")
def logs(
    new_pair: Callable[..., Pair],
    redis_process_with_password: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Logs, list[Path]]:
    """The traffic's session, the lines of each process by its component, and the files.

    The catalog goes away at the end, so that its address could be in a line; processes are
    terminated, so that their ends are logged too.
    """
    url = f"redis://:{PASSWORD}@127.0.0.1:{redis_process_with_password.port}"
    pair = new_pair(
        KVRECALL_CATALOG_URL=url,
        KVRECALL_STORE__REDIS_URL=url,
        KVRECALL_LOG_LEVEL="debug",
        KVRECALL_WIRE__TOKEN=TOKEN,
        KVRECALL_SERVER__TOKEN=TOKEN,
    )
    session = converse(pair.url)
    data = tmp_path_factory.mktemp("serve")
    serving = Process(
        "serve",
        ["--port", "0", "--data", str(data / "data"), *LIMITS],
        data / "serve.log",
        {"KVRECALL_LOG_LEVEL": "info"},
    )
    serving.start()
    converse(serving.address)
    assert serving.end(signal.SIGTERM) == 0
    redis_process_with_password.kill()
    failed = httpx.get(f"{pair.url}/v1/sessions/{session}", timeout=DEADLINE_SECONDS)
    assert failed.status_code == 503
    # The gateway's gRPC loses its connection meanwhile, of which its native code would write.
    pair.worker.end(signal.SIGTERM)
    pair.stop()
    files = [pair.gateway.log, pair.worker.log, serving.log]
    names = ("gateway", "worker", "serve")
    return session, {name: read_lines(file) for name, file in zip(names, files, strict=True)}, files


@pytest.fixture(scope="module")
def redis_process_with_password(redis_processes: Any, tmp_path_factory: Any) -> Any:
    """A Redis that asks for a password, which this module may kill."""
    from tests.conftest import RedisProcess

    class Protected(RedisProcess):
        def _answers(self) -> bool:
            import redis

            try:
                with redis.Redis(port=self.port, password=PASSWORD) as client:
                    return bool(client.ping())
            except redis.ConnectionError:
                return False

    return Protected(tmp_path_factory.mktemp("redis"), f"requirepass {PASSWORD}")


def find(lines: list[Json], event: str, **fields: Any) -> list[Json]:
    """Lines of an event with these fields."""
    wanted = {"event": event, **fields}
    return [line for line in lines if wanted.items() <= line.items()]


@pytest.mark.parametrize("component", ["gateway", "worker", "serve"])
def test_every_line_of_a_process_is_json_and_says_where_it_is_from(
    logs: Any, component: str
) -> None:
    _, by_component, _ = logs
    lines = by_component[component]
    assert len(lines) > 5
    for line in lines:
        assert {"timestamp", "level", "event", "component", "version"} <= line.keys(), line
        assert line["component"] == component
    if component == "worker":
        assert {line["worker"] for line in lines} == {WORKER}


def test_no_secret_of_requests_or_settings_is_in_a_log(logs: Any) -> None:
    _, by_component, files = logs
    assert find(by_component["gateway"], "catalog failed")
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert [secret for secret in SECRETS if secret in text] == [], file.name


def test_both_sides_of_the_wire_have_the_ids_of_a_request(logs: Any) -> None:
    session, by_component, _ = logs
    ids = {"request_id": "first-turn", "session": session, "trace_id": TRACE}
    (turn,) = find(by_component["gateway"], "turn", **ids)
    assert turn["tenant"] == digest_tenant(TENANT)
    (call,) = find(by_component["worker"], "call", method="Turn", **ids)
    assert (call["code"], call["level"]) == ("ok", "info")
    repairs = find(by_component["worker"], "call", method="Repair", session=session)
    # A call whose answer has been read is cancelled, and ended well all the same.
    assert {line["code"] for line in repairs} == {"ok"}


def test_a_turn_has_one_line_with_what_an_operator_looks_for(logs: Any) -> None:
    session, by_component, _ = logs
    turns = find(by_component["gateway"], "turn", code="ok")
    assert [line["turn"] for line in turns] == [1, 2, 3, 4]
    first, last = turns[0], turns[-1]
    # Its name in a registry of addresses.
    (listening,) = find(by_component["worker"], "listening")
    assert (first["session"], first["worker"]) == (session, listening["address"])
    assert first["level"] == "info"
    assert (first["output_tokens"], first["finish_reason"], first["durable"]) == (8, "length", True)
    assert first["remembered_tokens"] == 0
    assert last["remembered_tokens"] > first["prompt_tokens"]
    before = sum(
        value
        for name, value in first["seconds"].items()
        if name not in ("decode", "evict", "flush")
    )
    # The phases lie within the time from arrival to the first token.
    assert before - 1e-5 <= first["first_token"] < sum(first["seconds"].values()) + before
    assert {"waiting", "queued", "prefill", "first_token", "decode", "flush"} <= first[
        "seconds"
    ].keys()
    assert last["repairs"] >= 1
    (refused,) = find(by_component["gateway"], "turn", finish_reason="error")
    assert refused["code"] == "empty_turn"


def test_probes_and_scrapes_are_logged_at_debug_only(logs: Any) -> None:
    _, by_component, _ = logs
    for path in ("/healthz", "/readyz", "/metrics"):
        (line,) = find(by_component["gateway"], "request", path=path)
        assert (line["level"], line["route"]) == ("debug", path)
        assert not find(by_component["serve"], "request", path=path)
    assert not find(by_component["serve"], "request", level="debug")
    assert find(by_component["worker"], "call", method="Stats", level="debug")


def test_a_request_is_logged_with_its_route_beside_its_path(logs: Any) -> None:
    session, by_component, _ = logs
    route = "/v1/sessions/{session}/turns"
    found = find(by_component["gateway"], "request", route=route, status=200)
    assert {line["path"] for line in found} == {f"/v1/sessions/{session}/turns"}
    (unknown,) = find(by_component["gateway"], "request", status=404, route="unmatched")
    assert unknown["path"] == "/*"


def test_a_command_that_cannot_serve_says_so_in_json(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvrecall_server.cli",
        "worker",
        "--model",
        str(tmp_path / "none"),
    ]
    run = subprocess.run(
        [*command, "--listen", "127.0.0.1:0", "--data", str(tmp_path), "--log", "json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert run.returncode != 0
    assert "none" in find(lines, "command failed", level="error", component="worker")[0]["reason"]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[Json]]:
    """The lines that this process has written, as the component `worker` of a JSON log."""
    set_up_logs("json", "info", "worker", "w-1")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_libraries_warnings_and_uncaught_errors_take_the_form_of_our_lines(
    written: Callable[[], list[Json]],
) -> None:
    logging.getLogger("uvicorn.error").warning("invalid %s", "request")
    warnings.warn("deprecated", stacklevel=1)
    try:
        raise OSError("disk")
    except OSError:
        logging.getLogger("library").exception("failed")

    def fail() -> None:
        raise RuntimeError("in a thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    uvicorn, warned, failed, uncaught = written()
    assert (uvicorn["event"], uvicorn["logger"], uvicorn["level"]) == (
        "invalid request",
        "uvicorn.error",
        "warning",
    )
    assert "deprecated" in warned["event"]
    assert "OSError: disk" in failed["exception"]
    assert (uncaught["level"], uncaught["component"]) == ("critical", "worker")
    assert "RuntimeError: in a thread" in uncaught["exception"]


def test_a_client_that_leaves_is_no_error_of_grpcs(written: Callable[[], list[Json]]) -> None:
    library = logging.getLogger("grpc._cython.cygrpc")
    library.error("ExecuteBatchError raised in core by servicer method [/Worker/Turn]")
    library.error("Unexpected [ValueError] raised by servicer method [/Worker/Turn]")
    assert [line["event"].partition(" ")[0] for line in written()] == ["Unexpected"]


def test_a_librarys_broken_line_is_named_and_not_printed(written: Callable[[], list[Json]]) -> None:
    (handler,) = [each for each in logging.getLogger().handlers if isinstance(each, LogHandler)]
    library = logging.getLogger("library.that.is.broken")
    library.handlers, library.propagate = [handler], False  # pytest's own handlers would raise
    library.warning("%d pages", "many")
    (line,) = written()
    assert (line["event"], line["reason"]) == ("log line not formatted", "TypeError")


def test_a_library_with_a_handler_of_its_own_is_taken_over(
    written: Callable[[], list[Json]],
) -> None:
    own = logging.getLogger("library.that.writes.itself")
    own.addHandler(logging.StreamHandler(sys.stderr))
    own.propagate = False
    adopt_loggers()
    own.warning("loading")
    (line,) = written()
    assert (line["event"], line["logger"]) == ("loading", own.name)


LIBRARIES = """
import logging, warnings
from kvrecall_server.app.logs import adopt_loggers, set_up_logs
set_up_logs("json", "info", "worker")
import kvrecall_server.app.wiring
import huggingface_hub.utils, torch, tqdm, transformers.utils.logging as of_transformers
adopt_loggers()
of_transformers.get_logger("transformers.models").warning("1")
logging.getLogger("huggingface_hub.file_download").warning("2")
logging.getLogger("sentence_transformers").warning("3")
logging.getLogger("grpc._server").warning("4")
torch.nn.functional.softmax(torch.zeros(2))  # without a dimension, of which torch warns
for bar in (tqdm.tqdm, of_transformers.tqdm, huggingface_hub.utils.tqdm):
    list(bar(range(3), desc="Loading weights"))
raise RuntimeError("5")
"""


def test_the_models_libraries_write_no_line_and_no_bar_of_their_own() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIBRARIES],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    *warned, uncaught = [json.loads(line) for line in run.stderr.splitlines()]
    events = [line["event"] for line in warned]
    assert events[:4] == ["1", "2", "3", "4"]
    assert len(events) == 5
    assert "softmax" in events[4]
    assert (run.returncode, uncaught["level"]) == (1, "critical")
    assert "RuntimeError: 5" in uncaught["exception"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("debug", ["a", "b", "c"]), ("info", ["b", "c"]), ("warning", ["c"]), ("error", [])],
)
def test_the_level_bounds_what_is_written(
    written: Callable[[], list[Json]], level: Any, expected: list[str]
) -> None:
    set_up_logs("json", level, "gateway")
    log = structlog.get_logger("kvrecall.test")
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert [line["event"] for line in written()] == expected
    assert sum(isinstance(each, LogHandler) for each in logging.getLogger().handlers) == 1


word = st.text(
    st.characters(codec="ascii", exclude_characters="/@: \"'\\", categories=("L", "N")),
    min_size=8,
    max_size=40,
).map(lambda text: f"pw{text}wp")


@given(word, st.sampled_from(["redis", "rediss", "http", "redis+sentinel"]), word)
def test_passwords_of_urls_are_never_written(password: str, scheme: str, host: str) -> None:
    assume(password not in host)
    url = f"{scheme}://user:{password}@{host}:6379/0"
    for line in (f"cannot reach {url}: refused", json.dumps({"reason": url, "other": url})):
        assert password not in redact(line)
        assert host in redact(line)
