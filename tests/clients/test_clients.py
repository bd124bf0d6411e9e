"""Clients of this environment against a scripted worker; `make clients` runs all the others."""

import sys
from pathlib import Path

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.clients.environments import SCRIPTS, read_clients
from tests.clients.policy import answer
from tests.clients.run import CAPABILITIES, format_row, run_script
from tests.clients.server import REFERENCE, serve, serve_reference

ROOT = Path(__file__).parents[2]
# Those whose packages the tests install.
HERE = (
    "openai_chat.py",
    "openai_responses.py",
    "anthropic_messages.py",
    "openai_agents.py",
    "langgraph_agent.py",
)
WEATHER = '{"type": "function", "function": {"name": "get_weather"}}'


@pytest.mark.parametrize("script", HERE)
def test_a_client_gets_its_answers_each_conversation_in_one_session(script: str) -> None:
    with serve() as server:
        report = run_script([sys.executable, str(SCRIPTS / script)], server.url)
    assert {name: each["error"] for name, each in report.items()} == dict.fromkeys(CAPABILITIES)
    sessions = {name: (each["sessions"], each["turns"]) for name, each in report.items()}
    assert sessions == {
        "plain": (1, 1),
        "streamed": (1, 1),
        "turns": (1, 3),
        "tools": (1, 2),
        "streamed tools": (1, 2),
    }


def test_clients_without_prompts_of_their_own_get_the_reference_models_answers() -> None:
    with serve_reference() as url:
        reports = {
            script: run_script([sys.executable, str(SCRIPTS / script)], url, REFERENCE)
            for script in ("openai_chat.py", "openai_responses.py", "anthropic_messages.py")
        }
    fine = {"error": None, "sessions": 1, "turns": 1}
    expected = {"plain": fine, "streamed": fine, "turns": {**fine, "turns": 3}}
    assert reports == dict.fromkeys(reports, expected)


def test_a_script_that_fails_is_a_row_of_failures(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no package')")
    report = run_script([sys.executable, str(script)], "http://127.0.0.1:1")
    assert {each["error"] for each in report.values()} == {"no package"}
    assert format_row("x", "1", report, CAPABILITIES).split()[2:] == ["FAILED"] * len(CAPABILITIES)


def test_the_scripted_model_notices_a_lost_history() -> None:
    said = [
        pb.Message(role="user", content="My name is Ada."),
        pb.Message(role="assistant", content="Hello."),
        pb.Message(role="user", content="What is my name?"),
    ]
    assert answer(said, []) == "Your name is Ada."
    assert answer(said[2:], []) == "Nobody told me a name."


def test_the_scripted_model_calls_a_tool_and_reads_its_result() -> None:
    asked = pb.Message(role="user", content="What is the weather in Bern?")
    calls = answer([asked], [WEATHER])
    assert isinstance(calls, list)
    (call,) = calls
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')
    assert isinstance(answer([asked], []), str), "there is no such tool"
    result = pb.Message(role="tool", content="sunny", tool_call_id=call.id)
    assert answer([asked, result], [WEATHER]) == "The answer is: sunny"


def test_every_client_has_a_page_with_the_code_that_its_script_runs() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page: page.read_text("utf-8") for page in (ROOT / "docs/frameworks").glob("*.md")}
    assert all(f"frameworks/{page.name}" in nav for page in pages)
    for client in read_clients():
        script = SCRIPTS / client.script
        assert "[start:example]" in script.read_text(encoding="utf-8")
        snippet = f'--8<-- "{script.relative_to(ROOT)}:example"'
        assert any(snippet in text for text in pages.values()), client.script
