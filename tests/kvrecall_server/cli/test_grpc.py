"""`kvrecall serve --grpc`: refusals, and a stop of both APIs at once."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub
from kvrecall_server.app.local.server import launch

SERVICE = "kvrecall.sessions.v1.Sessions"


def test_a_grpc_address_in_use_is_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        taken = f"127.0.0.1:{bound.getsockname()[1]}"
        found = command("serve", "--data", tmp_path, "--port", "0", "--grpc", taken)
    assert found.exit_code == 2
    assert f"cannot listen on {taken} for gRPC" in found.output
    assert "Traceback" not in found.output


def test_health_is_gone_before_calls_are_refused_and_the_server_ends(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    environment = {**os.environ, "KVRECALL_SERVICE__NOTICE_SECONDS": "5"}
    arguments = ["--port", "0", "--data", str(tmp_path / "data"), "--grpc", address]
    process, _ = launch(arguments, tmp_path / "log", environment=environment)
    with process, grpc.insecure_channel(address) as channel:
        sessions = SessionsStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)

        def is_serving() -> bool:
            serving: int = health_pb2.HealthCheckResponse.SERVING
            return bool(health.Check(request).status == serving)

        assert is_serving()
        process.send_signal(signal.SIGTERM)
        until(lambda: not is_serving(), "the health says that the server stops")
        assert sessions.GetModel(pb.GetModelRequest()).model == "reference"
        assert process.wait(60) == 0
