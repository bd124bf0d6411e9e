"""A worker off loopback: it starts with a token, and serves gateways that have the same one."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrecall_server.app.errors import ServerNotReady

TOKEN = {"KVRECALL_SERVER__TOKEN": "the secret of this cluster"}


def test_a_worker_off_loopback_serves_only_gateways_with_its_token(
    command: Any, model: Path, tmp_path: Path
) -> None:
    def process(name: str, kind: str, arguments: list[str], **environment: str) -> Any:
        own = ["--data", str(tmp_path / name)]
        settings = {"KVRECALL_MODEL": str(model)}
        return command(kind, [*arguments, *own], tmp_path / f"{name}.log", settings | environment)

    listen = ["--listen", "0.0.0.0:0"]
    with pytest.raises(ServerNotReady, match="KVRECALL_SERVER__TOKEN"):
        process("open", "worker", listen).start()
    worker = process("worker", "worker", listen, **TOKEN)
    worker.start()
    port = worker.address.rpartition(":")[2]
    to_worker = ["--port", "0", "--worker", f"127.0.0.1:{port}"]
    for secret in ({}, {"KVRECALL_WIRE__TOKEN": "another secret, as long"}):
        refused = process("refused", "gateway", to_worker, **secret)
        refused.start()
        answer = httpx.post(f"{refused.address}/v1/sessions", json={}, timeout=300)
        assert (answer.status_code, answer.json()["code"]) == (503, "worker_lost")
        refused.end(signal.SIGTERM)
        assert "KVRECALL_WIRE__TOKEN" in refused.log.read_text(encoding="utf-8")
    secret = {"KVRECALL_WIRE__TOKEN": TOKEN["KVRECALL_SERVER__TOKEN"]}
    gateway = process("gateway", "gateway", to_worker, **secret)
    gateway.start()
    try:
        with httpx.Client(base_url=gateway.address, timeout=300) as http:
            session = http.post("/v1/sessions", json={"budget": 128}).json()["id"]
            turn = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
            sent = http.post(f"/v1/sessions/{session}/turns", json=turn)
            assert sent.status_code == 200, sent.text
    finally:
        gateway.end(signal.SIGTERM)
        worker.end(signal.SIGTERM)
