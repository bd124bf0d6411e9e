"""`kvrecall serve`: refusals, settings and shutdown."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import torch
from pydantic import ValidationError

from kvrecall_server.app.local.server import launch
from kvrecall_server.app.run import LISTENING
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.wiring import page_layout
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from reference import MODEL_PATH
from tests.kvstore.page_ids import make_ids
from workers.model.loader import load_model


def refused(found: Any, why: str) -> bool:
    """True if a command ended with exit code 2 and one line instead of a traceback."""
    return found.exit_code == 2 and why in found.output and "Traceback" not in found.output


def test_a_model_with_sliding_windows_is_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    config = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = command("serve", "--model", tmp_path, "--data", tmp_path / "data", "--port", "0")
    assert refused(found, "sliding")


def test_a_missing_model_is_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    found = command(
        "serve", "--model", tmp_path / "empty", "--data", tmp_path / "data", "--port", "0"
    )
    assert refused(found, "could not be loaded")


def test_a_data_directory_in_use_is_refused(
    command: Callable[..., Any], server: str, server_data: Path
) -> None:
    found = command("serve", "--data", server_data, "--port", "0")
    assert refused(found, "is in use by another kvrecall")


def test_a_data_directory_of_another_model_is_refused(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    layout = PageLayout(
        n_layers=1, n_kv_heads=1, head_dim=2, dtype=torch.float32, fingerprint="another"
    )
    store = RowStore(layout, [NvmeTier(tmp_path / "pages")])
    store.append("some-session", torch.zeros(1, 2, 1, 64, 2), make_ids(range(1)))
    store.flush("some-session")
    store.close()
    found = command("serve", "--data", tmp_path, "--port", "0")
    assert refused(found, "another model's rows")


def test_rows_of_another_quantization_are_refused(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    layout = page_layout(load_model(MODEL_PATH, dtype=torch.bfloat16, device="cpu"))
    store = RowStore(layout, [NvmeTier(tmp_path / "pages")])
    store.append(
        "some-session",
        torch.zeros(layout.rows_shape(layout.page_tokens), dtype=torch.bfloat16),
        make_ids(range(1)),
    )
    store.flush("some-session")
    store.close()
    found = command("serve", "--quantize", "int4", "--data", tmp_path, "--port", "0")
    assert refused(found, "another model's rows")


def test_an_unknown_quantization_is_refused_by_name(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_QUANTIZE", "int3")
    assert refused(command("serve", "--port", "0"), "quantize")


def test_a_model_is_not_divided_without_gpus(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = command("serve", "--device-map", "auto", "--data", tmp_path, "--port", "0")
    assert refused(found, "this machine has none")


def test_quantized_weights_in_float32_are_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("--quantize", "int8", "--dtype", "float32")
    found = command("serve", *options, "--data", tmp_path, "--port", "0")
    assert refused(found, "computes in bfloat16, not in float32")


def test_a_port_in_use_is_refused(command: Callable[..., Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = command("serve", "--data", tmp_path, "--port", str(taken.getsockname()[1]))
    assert refused(found, "choose another --port")


def test_a_setting_out_of_range_is_refused_by_name(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_WORKER__BLOCK_TOKENS", "0")
    assert refused(command("serve", "--port", "0"), "worker.block_tokens")


def test_the_environment_sets_what_the_command_line_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVRECALL_WORKER__BLOCK_TOKENS", "64")
    monkeypatch.setenv("KVRECALL_PORT", "9001")
    chosen: dict[str, Any] = {"worker": {"slots": 2}, "port": 9002}
    settings = Settings(**chosen)
    assert (settings.worker.block_tokens, settings.worker.slots, settings.port) == (64, 2, 9002)
    with pytest.raises(ValidationError):
        Settings(**{**chosen, "surprise": 1})


def iter_until(beginning: str, output: IO[bytes]) -> Iterator[bytes]:
    """Lines up to the first one with this beginning."""
    for line in output:
        yield line
        if line.decode().startswith(beginning):
            return


@pytest.mark.parametrize("ending", ["signal", "input"])
def test_a_server_exits_cleanly(tmp_path: Path, ending: str) -> None:
    arguments = [
        "serve",
        "--port",
        "0",
        "--data",
        str(tmp_path),
        "--log",
        "json",
        "--until-input-ends",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "kvrecall_server.cli", *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=dict(os.environ),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        lines = [line.decode().strip() for line in iter_until(LISTENING, process.stdout)]
        url = lines[-1].removeprefix(LISTENING)
        assert f"OpenAI's clients: base_url={url}/v1 model=reference" in lines
        assert f"Console: {url}/console/" in lines
        assert f"Anthropic's clients: base_url={url} model=reference" in lines
        if ending == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.wait(60) == 0


def test_a_server_is_not_ready_before_it_stops_listening(tmp_path: Path) -> None:
    environment = {**os.environ, "KVRECALL_SERVICE__NOTICE_SECONDS": "5"}
    arguments = ["--port", "0", "--data", str(tmp_path / "data")]
    process, url = launch(arguments, tmp_path / "log", environment=environment)
    with process:
        assert httpx.get(f"{url}/readyz", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        statuses = []
        with suppress(httpx.TransportError):  # it listens no more
            while True:
                statuses.append(httpx.get(f"{url}/readyz", timeout=60).status_code)
                time.sleep(0.05)
        assert statuses[-1] == 503
        assert process.wait(60) == 0


def test_pages_of_another_catalog_are_refused_in_one_line(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "catalog-id").write_text("another\n")
    found = command("serve", "--data", tmp_path, "--port", "0")
    assert refused(found, "belong to the sessions of catalog another")
