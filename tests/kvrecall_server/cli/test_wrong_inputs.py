"""What people get wrong: each is answered at once, in a line that says what to do, without torch."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start import preflight
from kvrecall_server.app.start.memory import (
    RowShape,
    divide_memory,
    get_pool_bytes,
    require_room,
)
from workers.cache.active_cache import ActiveCache, KVShape
from workers.engine.host.memory import measure_host_memory
from workers.engine.settings import WorkerSettings

# A request asks for the modules that a process has imported at its end.
PROGRAM = """
import sys
from kvrecall_server.cli.__main__ import main
sys.argv = ["kvrecall", *sys.argv[1:]]
try:
    main()
finally:
    print("imported:", *({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr)
"""

SERVE_REFUSALS: Sequence[tuple[Sequence[str], str]] = (
    (("--model", "smollm3"), "did you mean smollm2?"),
    (("--model", "referense"), "did you mean reference?"),
    (("--model", "gpt2"), "there is no model gpt2; expected"),
    (("--model", ""), "expected smollm2, reference, a folder"),
    (("--model", "/no/such/model"), "there is no /no; expected"),
    (("--model", "./emty"), "did you mean empty?"),
    (("--model", "models/tinny"), "did you mean models/tiny?"),
    (("--model", "empty"), "has no config.json"),
    (("--model", "notes.txt"), "notes.txt is a file, but no .gguf file"),
    (("--model", "text.gguf"), "is no GGUF file"),
    (("--model", "pointer.gguf"), "run: git lfs pull"),
    (("--model", "tex.gguf"), "did you mean text.gguf"),
    (("--budget", "4"), "expected at least 37"),
    (("--budget", "10000000", "--slots", "1000"), "rows do not fit memory: 1,000 slots x"),
    (("--data", "notes.txt"), "notes.txt is a file; expected a data directory"),
    (("--data", "notes.txt/data"), "is a file; expected a data directory"),
    (("--host", "no-host.invalid"), "other machines reach"),
    (("--grpc", "127.0.0.1:99999"), "a port up to 65535"),
    (("--port", "70000"), "--port"),
    (("--slots", "many"), "--slots"),
    (("--log", "xml"), "--log"),
)
VARIABLES: Sequence[tuple[str, str, str]] = (
    ("KVRECALL_SLOTS", "many", "did you mean KVRECALL_WORKER__SLOTS?"),
    ("KVRECALL_STORE__NVM_BYTES", "3", "did you mean KVRECALL_STORE__NVME_BYTES?"),
    ("KVRECALL_WORKER__SLOTS", "many", "set by KVRECALL_WORKER__SLOTS=many"),
    ("KVRECALL_WORKER", "8421", "expected the variable of a single setting"),
    ("KVRECALL_GATEWAY__MODEL_ALIASES", "gpt-4", "is a list, in JSON"),
    ("KVRECALL_DTYPE", "float8", "set by KVRECALL_DTYPE=float8"),
    ("KVRECALL_STORE__REDIS_URL", "localhost:6379", "redis"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a few things that are no models."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "text.gguf").write_text("text")
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_refusal(found: Any) -> str:
    """The text of a refused command, which is neither a traceback nor an object's repr."""
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    return " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize(("options", "why"), SERVE_REFUSALS)
def test_serve_refuses_it_and_says_what_to_do(
    command: Callable[..., Any], folder: Path, options: Sequence[str], why: str
) -> None:
    if "--port" not in options:
        options = (*options, "--port", "0")
    assert why in read_refusal(command("serve", *options))
    assert not (folder / "kvrecall-data" / "pages").exists()


@pytest.mark.parametrize(("name", "value", "why"), VARIABLES)
def test_a_wrong_variable_is_refused(
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str,
    value: str,
    why: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert why in read_refusal(command("serve", "--port", "0"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("fsck", "--data", "nowhere"), "has neither a catalog nor pages"),
        (("export", "s_1", "s.kvs", "--data", "nowhere"), "holds no catalog"),
        (("import", "nowhere.kvs"), "nowhere.kvs cannot be read"),
        (("import", "notes.txt"), "is no session archive"),
        (("replay", "nowhere.jsonl", "--url", "http://127.0.0.1:1"), "nowhere.jsonl"),
        (("chat", "--url", "http://127.0.0.1:1"), "no kvrecall service is ready"),
        (("chat", "--model", "smollm3"), "did you mean smollm2?"),
        (("demo", "--model", "smollm3"), "did you mean smollm2?"),
        (("worker", "--listen", "127.0.0.1:99999"), "a port up to 65535"),
        (("worker", "--listen", "somewhere"), "expected HOST:PORT"),
        (("worker", "--model", "smollm3"), "did you mean smollm2?"),
        (("servr",), "serve"),
    ],
)
def test_other_commands_say_what_to_do(
    command: Callable[..., Any], folder: Path, arguments: Sequence[str], why: str
) -> None:
    assert why in read_refusal(command(*arguments))


def test_what_stops_a_server_is_said_before_torch_is_imported(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments in (
            ("serve", "--model", "smollm3"),
            ("serve", "--budget", "4"),
            ("serve", "--budget", "10000000", "--slots", "1000"),
            ("serve", "--port", port),
            ("worker", "--listen", f"127.0.0.1:{port}"),
        ):
            ended = run_process(*arguments)
            assert ended.returncode == 2, ended.stderr
            assert ended.stderr.splitlines()[-1] == "imported:"


def run_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_commands_without_a_model_import_no_torch(folder: Path) -> None:
    for arguments in (
        ("--help",),
        ("serve", "--help"),
        ("version",),
        ("config",),
        ("keys", "list"),
        ("health", "http://127.0.0.1:1"),
    ):
        ended = run_process(*arguments)
        assert ended.stderr.splitlines()[-1] == "imported:", arguments


def test_a_command_that_starts_a_server_passes_on_why_it_did_not_start(
    folder: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_WORKER__SLOTS", "99999999")
    refused = command("chat", "--model", "reference", "--budget", "100")
    text = read_refusal(refused)
    assert "the server did not start: the active rows do not fit memory" in text
    assert "{" not in text


def test_a_file_of_logs_has_no_colours(folder: Path) -> None:
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "kvrecall_server.cli", "serve", "--model", "smollm3"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert "starting" in ended.stderr
    assert "\x1b" not in ended.stderr + ended.stdout


def test_slots_that_do_not_fit_are_refused_with_what_would() -> None:
    shape = RowShape(n_layers=2, n_kv_heads=3, row_numbers=16, itemsize=2)
    settings = WorkerSettings(slots=4, max_budget=1000, block_tokens=8, prompt_tokens=16)
    needed = get_pool_bytes(shape, settings)
    assert needed == 4 * (1000 + 8 + 16) * 2 * 3 * (2 * 8 * 2 + 9)
    require_room(shape, settings, needed, "memory")
    with pytest.raises(CannotServe, match=r"4 slots x 1,024 rows .* --slots 3 or --budget 999$"):
        require_room(shape, settings, needed - 1, "memory")


def test_slots_and_stored_rows_fit_the_memory_together() -> None:
    """Where no size is set, stored rows take what is left, and no more than a third."""
    assert divide_memory(10, 50, 60) == 50
    with pytest.raises(CannotServe, match=r"^the rows do not fit memory: slots .* lower --ram, "):
        divide_memory(10, 50, 59)
    assert divide_memory(10, None, 35) == 25
    assert divide_memory(10, None, 10) == 0
    assert divide_memory(10, None, 1 << 60) == measure_host_memory() // 3
    assert divide_memory(10, 50, None) == 50


def test_the_slots_are_as_large_as_is_said() -> None:
    settings = WorkerSettings(slots=4, max_budget=100, block_tokens=8, prompt_tokens=16)
    rows = [settings.slot_rows] * 2
    cache = ActiveCache(KVShape(2, 6, 3, 8), settings.slots, rows, torch.bfloat16)
    pool = cache.pool.memories[0]
    tensors = (pool.keys, pool.values, pool.positions, pool.promoted, pool.accumulated)
    shape = RowShape(n_layers=2, n_kv_heads=3, row_numbers=16, itemsize=2)
    assert get_pool_bytes(shape, settings) == sum(each.nbytes for each in tensors)


def test_a_models_shape_is_read_from_its_config(folder: Path) -> None:
    config = {
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "dtype": "bfloat16",
    }
    (folder / "empty" / "config.json").write_text(json.dumps(config))
    settings = Settings(model="empty")
    assert preflight.read_shape(settings) == RowShape(28, 4, 256, 2)
    assert preflight.read_shape(Settings(model="Qwen/Qwen2.5-7B-Instruct")) is None


def test_import_refuses_a_name_that_no_tenant_has(
    command: Callable[..., Any], folder: Path
) -> None:
    why = "a tenant's name has 1 to 64 letters, digits and . _ -"
    assert why in read_refusal(command("import", "notes.txt", "--tenant", "a b"))
