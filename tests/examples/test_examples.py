"""Examples: each one runs against a real server and prints what its docstring promises."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrecall import KvrecallClient
from kvrecall_server.app.local.server import ServerNeeds, server_at

EXAMPLES = Path(__file__).parents[2] / "examples"
FACT = "The extension list says Melnor K4821."


@pytest.fixture(scope="module")
def grpc_address() -> str:
    """HOST:PORT that is free."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def server(grpc_address: str) -> Iterator[str]:
    """Address of a real server process with the reference model, which serves gRPC, too."""
    with server_at(None, ServerNeeds(slots=4, max_budget=1024, grpc=grpc_address)) as url:
        yield url


@pytest.fixture
def run(server: str) -> Iterator[Callable[..., str]]:
    """Run an example and return its output; it leaves no session behind."""

    def run_example(name: str, typed: str = "", *options: str) -> str:
        found = subprocess.run(
            [sys.executable, EXAMPLES / name, *(options or ("--url", server))],
            input=typed,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    yield run_example
    with KvrecallClient(server) as client:
        assert client.list_sessions().sessions == ()


def find_numbers(pattern: str, output: str) -> tuple[int, ...]:
    """Return the groups of the pattern's first match as numbers."""
    match = re.search(pattern, output)
    assert match is not None, output
    return tuple(int(group) for group in match.groups())


def test_chat_streams_replies_and_reports_memory(run: Callable[..., str]) -> None:
    typed = "Please note that the pin list says Zelrik B4108.\nWhat is Zelrik's pin?\n\n"
    output = run("chat.py", typed)
    assert "a budget of 256 rows" in output
    assert "The pin list says Zelrik B4108." in output
    assert len(re.findall(r"\[\d+ tokens, \d+ active, \d+ evicted\]", output)) == 2


def test_the_agent_runs_its_tool_and_the_repair_finds_the_fact(run: Callable[..., str]) -> None:
    output = run("agent_with_tools.py")
    assert "the model calls on_call(" in output
    assert re.search(r"repair on tool_result: [1-9]\d* rows in ", output)
    evicted, length = find_numbers(r"(\d+) of (\d+) tokens have evicted rows", output)
    assert 500 < evicted < length
    assert output.endswith(f"{FACT}\n")


def test_budget_alone_loses_what_a_repair_brings_back(run: Callable[..., str]) -> None:
    output = run("budget_and_repair.py")
    full, alone, repaired = re.split(r"budget alone|with repair", output)
    assert FACT in full
    assert FACT not in alone
    assert FACT in repaired
    assert "Melnor K4821" in repaired.split("promoted for")[1]
    active, length = find_numbers(r": (\d+) of (\d+) rows active", repaired)
    assert active <= 128 < length


def test_a_fork_continues_in_another_way(run: Callable[..., str]) -> None:
    output = run("fork_and_compare.py")
    assert "forked at turn 2" in output
    assert f"session: {FACT}" in output
    assert "fork:    The extension list says Melnor Q1200." in output
    earlier, length = find_numbers(r"turn 1 has (\d+) of (\d+) tokens", output)
    assert 0 < earlier < length


def test_async_streams_run_at_once(run: Callable[..., str]) -> None:
    output = run("stream_async.py")
    for index, name in enumerate(("Melnor", "Barki", "Venbak")):
        assert re.search(rf"{name}: [1-9]\d* pieces, the first after 0\.\d+ s", output)
        assert f"The badge list says {name} K482{index}." in output


def test_the_grpc_client_streams_and_reports_its_tools_result(
    run: Callable[..., str], grpc_address: str
) -> None:
    output = run("grpc_client.py", "", "--address", grpc_address)
    assert "the model calls on_call(" in output
    assert re.search(r"repair on REPAIR_TRIGGER_TOOL_RESULT: \d+ rows", output)
    assert FACT in output
    active, length = find_numbers(r"(\d+) of (\d+) rows active", output)
    assert 0 < active <= length
    assert output.endswith("refused: BUDGET_OUT_OF_RANGE at budget\n")


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"\(([a-z_]+\.py)\)", (EXAMPLES / "README.md").read_text()))
    tested = set(re.findall(r'run\("([a-z_]+\.py)"', Path(__file__).read_text()))
    assert files == listed == tested
