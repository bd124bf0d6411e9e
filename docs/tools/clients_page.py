"""The page of clients and agents: what each could do when `make clients` ran last."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tables

CAPABILITIES = ("plain", "streamed", "turns", "tools", "streamed tools")
SCENARIOS = (
    "plain",
    "turns",
    "tool",
    "parallel calls",
    "failing tool",
    "image",
    "resume",
    "cancel",
    "compaction",
    "subagent",
)
_AGENTS = """# Clients

What each client could do when `make clients` ran last, unmodified, in an environment of its own, against
the application of `kvrecall serve` with a scripted worker. The file is `benchmarks/results/clients.json`.

## Coding agents

[Frameworks](../frameworks/index.md#coding-agents) says what the columns are.

<!-- --8<-- [start:agents] -->
"""
_LIBRARIES = """<!-- --8<-- [end:agents] -->

## Libraries

`turns` is a conversation of three requests, `tools` a tool's call and the answer to its result. A
conversation is one session; where a client repeats its messages in other words or with other tools, the
number of sessions is in brackets. A dash: the client has no such mode. Clients that add no prompts of their
own were also run against `kvrecall serve` with the reference model: plain, streamed and in turns, without
tools, as it was not trained on theirs.

"""

Result = Mapping[str, Any]


def build(root: Path) -> str:
    """Build the page from the results."""
    results = json.loads((root / "benchmarks" / "results" / "clients.json").read_text("utf-8"))
    agents = [_build_agent_row(name, each) for name, each in results.items() if "scenarios" in each]
    clients = [
        _build_client_row(name, each) for name, each in results.items() if "capabilities" in each
    ]
    return "".join(
        (
            _AGENTS,
            tables.to_table(["agent", "package", "on", *SCENARIOS, "left out"], agents),
            _LIBRARIES,
            tables.to_table(
                ["client", "packages", "on", *CAPABILITIES, "reference model"], clients
            ),
        )
    )


def _build_agent_row(name: str, agent: Result) -> list[str]:
    scenarios: Mapping[str, Result] = agent["scenarios"]
    left_out = {part for each in scenarios.values() for part in each.get("ignored", ())}
    return [
        name,
        *_build_origin(agent),
        *(_format(scenarios.get(scenario)) for scenario in SCENARIOS),
        ", ".join(f"`{part}`" for part in sorted(left_out)),
    ]


def _build_client_row(name: str, client: Result) -> list[str]:
    capabilities: Mapping[str, Result] = client["capabilities"]
    return [
        name,
        *_build_origin(client),
        *(_format(capabilities.get(capability)) for capability in CAPABILITIES),
        _format_all(client.get("reference")),
    ]


def _build_origin(client: Result) -> list[str]:
    """Build the cells of packages and date."""
    packages = ", ".join(f"`{package}`" for package in client["packages"])
    return [packages, client.get("date", "-")]


def _format(result: Result | None) -> str:
    if result is None:
        return "-"
    if result["error"]:
        return "failed"
    sessions = result.get("sessions", 1)
    return "yes" if sessions == 1 else f"yes ({sessions})"


def _format_all(results: Mapping[str, Result] | None) -> str:
    """Format the capabilities of one model as one cell."""
    cells = [_format(result) for result in (results or {}).values()]
    return "yes" if cells and set(cells) == {"yes"} else ", ".join(cells) or "-"
