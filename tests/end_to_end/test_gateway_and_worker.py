"""A gateway and its worker as two processes with certificates.

Their replies equal those of one process.

The worker is killed within a turn and in a pause, and started again over its directory while the
gateway keeps running; then the gateway is killed.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from faults.rig.ports import free_port
from kvrecall.client import KvrecallClient, KvrecallError, TextDelta, Turn, TurnCompleted

Json = dict[str, Any]
END_SECONDS = 300.0
SETTINGS: Json = {
    "budget": 128,
    "research": {
        "method": "snapkv",
        "repair_rows": 32,
        "repair_on": ["tool_call", "tool_result", "turn"],
    },
    "seed": 17,
}
GREEDY: Json = {"max_tokens": 16, "stop": ["<tool_call>"]}
ROWS = ("length", "active_rows", "evicted_rows", "promoted_rows")
LIMITS = ("--slots", "2", "--budget", "256", "--block", "64")


@dataclass
class Pair:
    """A worker and a gateway, on folders of their own."""

    worker: Any
    gateway: Any
    client: KvrecallClient

    def restart_worker(self, say: Any, how: signal.Signals = signal.SIGKILL) -> None:
        """End the worker and start it again; wait until the gateway has found it."""
        self.worker.end(how)
        self.back(say)

    def back(self, say: Any) -> None:
        """Start the worker again over its directory; wait until the gateway has found it."""
        self.worker.start()
        say.until(self.client.ready, "the way to the worker")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and one key and certificate by it for both sides."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return folder


@pytest.fixture(scope="module")
def pair(
    model: Path,
    certificates: Path,
    command: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """A worker that requires client certificates, and a gateway that has one."""
    folder = tmp_path_factory.mktemp("pair")
    both = [
        "--tls-cert",
        str(certificates / "cert.pem"),
        "--tls-key",
        str(certificates / "key.pem"),
    ]
    ca = str(certificates / "ca.pem")
    worker = command(
        "worker",
        [
            "--listen",
            "127.0.0.1:0",
            "--data",
            str(folder / "worker"),
            *LIMITS,
            *both,
            "--tls-client-ca",
            ca,
        ],
        folder / "worker.log",
        {"KVRECALL_MODEL": str(model), "KVRECALL_SERVER__DRAIN_SECONDS": "300"},
    )
    worker.start()
    worker.arguments[1] = worker.address  # where it is found again
    gateway = command(
        "gateway",
        [
            "--worker",
            worker.address,
            "--port",
            "0",
            "--data",
            str(folder / "gateway"),
            *both,
            "--tls-ca",
            ca,
        ],
        folder / "gateway.log",
        {"PYTHONPROFILEIMPORTTIME": "1", "KVRECALL_WIRE__RECONNECT_SECONDS": "0.2"},
    )
    gateway.forked = False  # its imports are its own
    gateway.start()
    with KvrecallClient(gateway.address, timeout_seconds=END_SECONDS) as client:
        yield Pair(worker, gateway, client)
    for each in (gateway, worker):
        if each.running is not None:
            each.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def steps(say: Any) -> list[Json]:
    """Two turns, a pause, a tool's result, and two turns after it."""
    asking = [
        say.user("Which code opens the locker of Ada?"),
        say.asks("c1", name="Ada", thing="locker"),
    ]
    return [
        {"messages": [say.user(say.chatter(51, 30))], **GREEDY},
        {"messages": [say.user(say.chatter(52, 25))], **GREEDY},
        {"messages": asking, "generate": False},
        {
            "event": "tool_call.completed",
            "call_id": "c1",
            "result": "Ada's locker has number 4821.",
        },
        {"messages": [], **GREEDY, "wait_for_repairs": True},
        {"messages": [say.user("And what is the code of Ben's garage?")], **GREEDY},
    ]


def substance(turn: Turn) -> Json:
    """A turn's result without ids, times and bytes since the start of the process."""
    memory = turn.memory
    repairs = [(each.trigger, each.signal_tokens, each.promoted) for each in memory.repairs]
    rows = {name: getattr(memory, name) for name in ROWS}
    return {"message": turn.message, "usage": turn.usage, "rows": rows, "repairs": repairs}


def converse(
    client: KvrecallClient, steps: list[Json], before: Mapping[int, Callable[[str], None]]
) -> list[Json]:
    """Take all steps in a new session, and do at some what is to be done before."""
    session = client.create_session(**SETTINGS).id
    turns = []
    for number, step in enumerate(steps):
        before.get(number, lambda _: None)(session)
        if "event" in step:
            client.event(session, step["event"], call_id=step["call_id"], result=step["result"])
        else:
            turns.append(substance(client.turn(session, **step)))
    return turns


@pytest.fixture(scope="module")
def undisturbed(new_server: Callable[..., Any], steps: list[Json]) -> list[Json]:
    """Results of an undisturbed `kvrecall serve` in one process."""
    server = new_server()
    server.start()
    turns = converse(server.own, steps, {})
    server.kill()
    assert all(turn["rows"]["evicted_rows"] for turn in turns), "nothing was ever evicted"
    assert [(trigger, promoted > 0) for trigger, _, promoted in turns[3]["repairs"]] == [
        ("tool_call", True),
        ("tool_result", True),
    ]
    return turns


def test_two_processes_reply_like_one(
    pair: Pair, steps: list[Json], undisturbed: list[Json]
) -> None:
    assert converse(pair.client, steps, {}) == undisturbed


def test_a_killed_worker_costs_the_turn_that_ran_and_nothing_else(
    pair: Pair, steps: list[Json], undisturbed: list[Json], say: Any
) -> None:
    def in_a_turn(session: str) -> None:
        before = pair.client.get_session(session)
        stream = pair.client.stream(session, [say.user("Go on.")], max_tokens=2000, key="broken")
        assert [type(next(stream)) for _ in range(3)] == [TextDelta] * 3
        pair.worker.end(signal.SIGKILL)
        with pytest.raises(KvrecallError) as lost:
            list(stream)
        assert lost.value.code == "worker_lost"
        assert not pair.client.ready()
        with pytest.raises(KvrecallError) as refused:
            pair.client.turn(session, [say.user("Hello?")])
        assert (refused.value.status, refused.value.code) == (503, "worker_lost")
        pair.back(say)
        assert pair.client.get_session(session) == before

    def in_the_pause(session: str) -> None:
        say.until(lambda: pair.client.memory(session).promoted_rows > 0, "the early repair")
        pair.restart_worker(say)

    def when_idle(_: str) -> None:
        pair.restart_worker(say)

    assert (
        converse(pair.client, steps, {1: in_a_turn, 3: in_the_pause, 5: when_idle}) == undisturbed
    )


def test_a_terminated_worker_completes_its_turn_first(pair: Pair, say: Any) -> None:
    session = pair.client.create_session(**SETTINGS).id
    stream = pair.client.stream(session, [say.user("Go on.")], max_tokens=200)
    assert isinstance(next(stream), TextDelta)
    assert pair.worker.end(signal.SIGTERM) == 0
    done = list(stream)[-1]
    assert isinstance(done, TurnCompleted)
    assert done.turn.usage.output_tokens == 200
    pair.back(say)
    found = pair.client.get_session(session)
    assert (found.turns, found.length) == (1, done.turn.memory.length)
    assert pair.client.turn(session, [say.user("Hello.")], generate=False).turn == 2


def test_a_turn_that_a_killed_gateway_did_not_commit_leaves_no_trace(pair: Pair, say: Any) -> None:
    session = pair.client.create_session(**SETTINGS).id
    pair.client.turn(session, [say.user(say.chatter(53, 10))], generate=False)
    before = pair.client.get_session(session)
    stream = pair.client.stream(session, [say.user("Go on.")], max_tokens=4000)
    assert isinstance(next(stream), TextDelta)
    pair.gateway.end(signal.SIGKILL)
    with pytest.raises(KvrecallError):
        list(stream)
    pair.gateway.start()
    with KvrecallClient(pair.gateway.address, timeout_seconds=END_SECONDS) as client:
        assert client.get_session(session) == before
        assert client.turn(session, [say.user("Hello.")], generate=False).turn == 2


def test_a_gateway_imports_no_torch(pair: Pair) -> None:
    log = pair.gateway.log.read_text(encoding="utf-8")
    imported = {
        line.rsplit("|", 1)[-1].strip()
        for line in log.splitlines()
        if line.startswith("import time:")
    }
    assert {"services.cluster.grpc_client", "gateway.app"} <= imported
    assert not {
        name
        for name in imported
        if name.split(".")[0] in ("torch", "transformers", "kvstore.format.page")
    }
    assert "kvstore.store" not in imported


def test_a_terminated_gateway_exits_cleanly_and_its_worker_keeps_running(pair: Pair) -> None:
    assert pair.gateway.end(signal.SIGTERM) == 0
    assert pair.worker.running is not None
    assert pair.worker.running.poll() is None
    assert pair.worker.end(signal.SIGTERM) == 0


def test_a_gateway_starts_before_its_worker_and_says_when_to_try_again(
    command: Any, model: Path, tmp_path: Path, say: Any
) -> None:
    def process(name: str, *arguments: str) -> Any:
        data = ["--data", str(tmp_path / name)]
        environment = {"KVRECALL_MODEL": str(model)}
        return command(name, [*arguments, *data], tmp_path / f"{name}.log", environment)

    address = f"127.0.0.1:{free_port()}"
    gateway = process("gateway", "--port", "0", "--worker", address)
    gateway.start()
    worker = process("worker", "--listen", address, *LIMITS)
    try:
        with httpx.Client(base_url=gateway.address, timeout=END_SECONDS) as http:
            refused = http.post("/v1/sessions", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "worker_lost")
            assert int(refused.headers["retry-after"]) > 0
            assert http.get("/readyz").status_code == 200
            assert http.get("/readyz", params={"workers": True}).status_code == 503
            worker.start()
            say.until(
                lambda: http.get("/readyz", params={"workers": True}).is_success, "the worker"
            )
            assert http.post("/v1/sessions", json={"budget": 128}).is_success
    finally:
        gateway.end(signal.SIGTERM)
        worker.end(signal.SIGTERM)
