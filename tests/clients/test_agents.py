"""The agents' lab without agents: its scripted model, its runs, and the pages; `make clients` has them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.clients.agent_policy import answer
from tests.clients.environments import Agent, read_agents
from tests.clients.lab import run_scenario
from tests.clients.scenarios import SCENARIOS
from tests.clients.workplace import SETTINGS

ROOT = Path(__file__).parents[2]
# An agent of one request, which prints the answer or the error.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
body = {"model": "scripted", "messages": [{"role": "user", "content": sys.argv[1]}], **json.loads(sys.argv[2])}
request = urllib.request.Request(
    os.environ["URL"] + "/v1/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json"},
)
try:
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
except urllib.error.HTTPError as error:
    print("Your name is Ada.", error.code)
"""


def make_agent(more: str) -> Agent:
    """An agent whose requests have more members; its command lines are templates."""
    program = PROGRAM.replace("{", "{{").replace("}", "}}")
    script = 'export URL="$ANTHROPIC_BASE_URL"; exec "$@"'
    members = more.replace("{", "{{").replace("}", "}}")
    ask = ("sh", "-c", script, "sh", sys.executable, "-c", program, "{prompt}", members)
    return Agent("one", "one", ("one==1",), "claude-code.sh", ask)


def call(messages: Sequence[pb.Message], tools: Sequence[str]) -> list[pb.ToolCall]:
    reply = answer(messages, tools)
    assert not isinstance(reply, str)
    return reply


def make_tool(name: str, **properties: object) -> str:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_an_answer_in_a_scenario_is_counted(tmp_path: Path) -> None:
    report = run_scenario(make_agent("{}"), [], tmp_path, "plain")
    assert report["error"] is None
    assert (report["requests"], report["matches"], report["refused"]) == (1, {"built": 1}, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_request_fails_a_scenario_whatever_the_agent_prints(tmp_path: Path) -> None:
    report = run_scenario(make_agent('{"n": -1}'), [], tmp_path, "plain")
    assert report["error"] == "1 requests were refused or failed"
    (refusal,) = report["refusals"]
    assert refusal.startswith("POST /v1/chat/completions 4")
    assert "n" in refusal


def test_an_agent_that_says_something_else_fails(tmp_path: Path) -> None:
    report = run_scenario(make_agent('{"messages": []}'), [], tmp_path, "tool")
    assert "did not print 'The results are:'" in report["error"]


def test_the_model_calls_the_agents_shell_once_for_each_command() -> None:
    asked = pb.Message(role="user", content="<note>x</note>Please run [cat a.txt] and [cat b.txt].")
    shell = make_tool("Bash", command={"type": "string"}, timeout={"type": "number"})
    calls = call([asked], [make_tool("Read", file_path={"type": "string"}), shell])
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [
        ("Bash", {"command": "cat a.txt", "timeout": 1}),
        ("Bash", {"command": "cat b.txt", "timeout": 1}),
    ]
    results = [pb.Message(role="tool", content=text) for text in ("one", "two")]
    reminder = pb.Message(role="user", content="<system-reminder>be brief</system-reminder>")
    assert answer([asked, *results, reminder], [shell]) == "The results are: one | two"


def test_the_model_tells_the_name_also_where_it_is_asked_for_a_summary() -> None:
    said = [
        pb.Message(role="user", content="My name is Ada."),
        pb.Message(role="user", content="Please run [cat a.txt]."),
        pb.Message(role="tool", content="one"),
    ]
    demand = pb.Message(role="user", content="Write a summary of the conversation above.")
    assert answer([*said, demand], []) == "Your name is Ada."
    assert answer([*said[1:], demand], []) == "Nobody told me a name."


def test_the_model_waits_for_a_subagent_that_has_to_be_waited_for() -> None:
    asked = pb.Message(role="user", content="Please delegate [My name is Ada. What is my name?].")
    tools = [
        make_tool("agents__spawn_agent", message={"type": "string"}),
        make_tool("agents__wait_agent", targets={"type": "array", "items": {"type": "string"}}),
    ]
    started = pb.Message(role="tool", content='{"agent_id": "a1"}')
    (spawn,) = call([asked], tools)
    (wait,) = call([asked, started], tools)
    assert json.loads(spawn.arguments) == {"message": "My name is Ada. What is my name?"}
    assert (wait.name, json.loads(wait.arguments)) == ("agents__wait_agent", {"targets": ["a1"]})


@pytest.mark.parametrize("agent", read_agents(), ids=lambda agent: agent.key)
def test_every_agent_has_a_page_with_its_package_and_settings(agent: Agent) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/frameworks").glob("*.md")]
    included = f'--8<-- "{(SETTINGS / agent.settings).relative_to(ROOT)}"'
    (page,) = [page for page in pages if included in page]
    assert agent.packages[0] in page
    assert all(
        part in page for part in ("**What to set.**", "**What works.**", "**What is ignored.**")
    )
    assert set(agent.lacks) <= set(SCENARIOS)


def test_the_index_shows_the_table_of_the_last_run() -> None:
    index = (ROOT / "docs/frameworks/index.md").read_text(encoding="utf-8")
    assert '--8<-- "docs/reference/clients.md:agents"' in index
    table = (ROOT / "docs/reference/clients.md").read_text(encoding="utf-8")
    agents, _, _ = table.partition("[end:agents]")
    assert all(f"| {agent.name} |" in agents for agent in read_agents())
