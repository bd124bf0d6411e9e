"""Refusals of `kvrecall worker` and `kvrecall gateway` before they serve."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refused(found: Any, why: str) -> bool:
    """True if a command ended with exit code 2 and one line instead of a traceback."""
    return found.exit_code == 2 and why in found.output and "Traceback" not in found.output


def test_a_worker_refuses_an_address_in_use(command: Callable[..., Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = command("worker", "--listen", address, "--data", tmp_path)
    assert refused(found, f"cannot listen on {address}")
    assert not list(tmp_path.iterdir())


def test_a_worker_refuses_a_missing_certificate(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.pem"
    found = command(
        "worker", "--listen", "127.0.0.1:0", "--tls-cert", missing, "--tls-key", missing
    )
    assert refused(found, "a certificate cannot be read")


@pytest.mark.parametrize("name", ["worker", "gateway"])
def test_half_of_a_certificate_and_key_is_refused(
    command: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    assert refused(command(name, "--tls-cert", tmp_path / "cert.pem"), "belong together")


def test_a_gateway_refuses_a_missing_certificate(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    found = command(
        "gateway", "--tls-ca", tmp_path / "missing.pem", "--port", "0", "--data", tmp_path
    )
    assert refused(found, "a certificate cannot be read")
