"""`kvrecall health`: the exit code and the one line of a probe, against real servers."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from faults.rig.ports import free_port
from kvrecall.protocol.certificates import bind
from kvrecall_server.cli.extras import GATEWAY, SHARED, WORKER
from tests.end_to_end.servers import Process
from workers.rpc.authentication import TokenInterceptor
from workers.rpc.settings import ServerSettings

# A start of the interpreter and the imports, on a machine under load.
SECONDS = 300
TOKEN = "the secret of this cluster"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def probe(*arguments: str, hidden: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """Run `kvrecall health` in a process of its own; exit code and standard error."""
    program = (
        "import sys, os; hidden, sys.argv[1:] = sys.argv[1].split(), sys.argv[2:]; "
        "sys.modules.update(dict.fromkeys(hidden)); "
        "from kvrecall_server.cli.__main__ import main; main()"
    )
    command = [sys.executable, "-c", program, " ".join(hidden), "health", *arguments]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HTTP_PROXY": "http://127.0.0.1:1", **environment},
    )
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


def assert_refused(found: tuple[int, str], *words: str) -> None:
    """The probe failed with one line that has these words."""
    code, line = found
    assert code == 1, line
    assert line.startswith("kvrecall: ")
    assert line.count("\n") == 1
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, str]]:
    """A real worker that asks for a token, and its address for operators."""
    folder = tmp_path_factory.mktemp("worker")
    operators = f"127.0.0.1:{free_port()}"
    arguments = ["--listen", "127.0.0.1:0", "--ops", operators, "--data", str(folder / "data")]
    process = Process("worker", arguments, folder / "log", {"KVRECALL_SERVER__TOKEN": TOKEN})
    process.start()
    yield process, operators
    process.end(signal.SIGKILL)


def test_a_worker_is_healthy_and_ready_on_both_of_its_ports(worker: tuple[Process, str]) -> None:
    process, operators = worker
    for flags in ((), ("--ready",)):
        assert probe(f"http://{operators}", *flags) == (0, "")
        found = probe(f"grpc://{process.address}", *flags, KVRECALL_WIRE__TOKEN=TOKEN)
        assert found == (0, "")


def test_a_worker_refuses_a_probe_without_its_token(worker: tuple[Process, str]) -> None:
    address = f"grpc://{worker[0].address}"
    assert_refused(probe(address), "UNAUTHENTICATED", "KVRECALL_WIRE__TOKEN")
    assert_refused(probe(address, KVRECALL_WIRE__TOKEN=TOKEN[::-1]), "UNAUTHENTICATED")


def test_a_gateway_is_asked_over_http(server: str) -> None:
    assert probe(server) == (0, "")
    assert probe(f"{server}/", "--ready") == (0, "")
    assert_refused(probe(f"{server}/v2"), "/v2/healthz answered 404")


@pytest.mark.parametrize("other", [GATEWAY, WORKER], ids=["of gateways", "of workers"])
def test_it_runs_without_the_libraries_of_the_other_side(
    other: tuple[str, ...], worker: tuple[Process, str]
) -> None:
    hidden = tuple(name for name in other if name not in SHARED)
    assert hidden
    assert probe(f"http://{worker[1]}", "--ready", hidden=hidden) == (0, "")
    address = f"grpc://{worker[0].address}"
    assert probe(address, hidden=hidden, KVRECALL_WIRE__TOKEN=TOKEN) == (0, "")


@contextmanager
def http_server(status: int, body: bytes) -> Iterator[str]:
    """The address of an HTTP server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("location", "http://127.0.0.1:1/")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b'{"detail": "no worker\\nanswers"}', "503: no worker answers"),
        (503, b"the worker takes no sessions now\n", "503: the worker takes no sessions now"),
        (500, b"[1]", "500: [1]"),
        (301, b"elsewhere", "301: elsewhere"),
        (204, b"", "204: "),
    ],
)
def test_only_the_answer_200_is_healthy(status: int, body: bytes, reason: str) -> None:
    with http_server(status, body) as url:
        assert_refused(probe(url, "--ready"), f"/readyz answered {reason}")


@asynccontextmanager
async def health_server(
    status: Any, interceptors: tuple[Any, ...] = (), **settings: Any
) -> AsyncIterator[str]:
    """The address of a real server of grpc.health.v1 with this status."""
    server = grpc.aio.server(interceptors=interceptors)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", status)
    port = bind(server, "127.0.0.1:0", ServerSettings(**settings))
    await server.start()
    try:
        yield f"grpc://localhost:{port}"
    finally:
        await server.stop(None)


async def in_thread(*arguments: str, **environment: str) -> tuple[int, str]:
    """A probe beside the server of this event loop."""
    return await asyncio.to_thread(lambda: probe(*arguments, hidden=(), **environment))


async def test_a_draining_worker_is_alive_but_not_ready() -> None:
    async with health_server(NOT_SERVING) as url:
        assert await in_thread(url) == (0, "")
        assert_refused(await in_thread(url, "--ready"), "takes no work now: NOT_SERVING")


async def test_certificates_and_token_are_those_of_the_wire_settings(tmp_path: Path) -> None:
    ca = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "other", "cert", "key")}
    ca.cert_pem.write_to_path(files["ca"])
    trustme.CA().cert_pem.write_to_path(files["other"])
    issued = ca.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    pair = {"tls_cert": files["cert"], "tls_key": files["key"]}
    own = {f"KVRECALL_WIRE__{name.upper()}": str(path) for name, path in pair.items()}
    authority = {"KVRECALL_WIRE__TLS_CA": str(files["ca"])}
    token = {"KVRECALL_WIRE__TOKEN": TOKEN}
    guard = (TokenInterceptor(TOKEN),)
    async with health_server(SERVING, guard, **pair, tls_client_ca=files["ca"]) as url:
        assert await in_thread(url, "--ready", **authority, **own, **token) == (0, "")
        assert_refused(await in_thread(url, **authority, **own), "UNAUTHENTICATED")
        assert_refused(await in_thread(url, **authority, **token), "UNAVAILABLE")
        other = {"KVRECALL_WIRE__TLS_CA": str(files["other"])}
        assert_refused(await in_thread(url, **other, **own, **token), "UNAVAILABLE")
        missing = {"KVRECALL_WIRE__TLS_CA": str(tmp_path / "missing")}
        assert_refused(await in_thread(url, **missing), "certificate cannot be read", "missing")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_accepts_and_is_silent_ends_in_the_timeout(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        found = probe(url, "--timeout", "0.5")
    assert_refused(found, f"{url} did not answer within 0.5 seconds")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_address_without_a_server_is_not_healthy(
    scheme: str, command: Callable[..., Any]
) -> None:
    found = command("health", f"{scheme}://127.0.0.1:{free_port()}")
    assert found.exit_code == 1
    assert "127.0.0.1" in found.output


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8421", "localhost", "ftp://a:1", "grpc://host", "http://", "http://a:99999"]
)
def test_what_is_no_address_is_refused_with_the_forms_that_are(
    url: str, command: Callable[..., Any]
) -> None:
    found = command("health", url)
    assert found.exit_code == 1
    assert f"{url} is no address" in found.output
