"""Run real clients and agents, unmodified, against a scripted worker: `make clients`.

Prints a table and writes benchmarks/results/clients.json. Without arguments all clients of
clients.toml and all agents of agents.toml, one after the other; with arguments those whose
script's name or key contains one of them. Those that add no prompts of their own are run against
`kvrecall serve` with the reference model as well, without tools, as it was not trained on theirs.
Environments are kept in build/clients.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from tests.clients import lab
from tests.clients.environments import (
    Agent,
    Client,
    get_version,
    prepare,
    prepare_agent,
    read_agents,
    read_clients,
)
from tests.clients.scenarios import SCENARIOS
from tests.clients.server import MODEL, REFERENCE, serve, serve_reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "clients"
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
CAPABILITIES = ("plain", "streamed", "turns", "tools", "streamed tools")
_SECONDS = 300
# Clients that would ask servers elsewhere for prices or send them telemetry.
_QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
}

Report = dict[str, dict[str, Any]]


def run_script(command: Sequence[str], url: str, model: str = MODEL) -> Report:
    """Run a client's script; returns what it reports, or its failure for all capabilities."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **_QUIET, "KVRECALL_URL": url, "KVRECALL_MODEL": model}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_SECONDS
    )
    lines = done.stdout.strip().splitlines()
    try:
        report: Report = json.loads(lines[-1])
    except (IndexError, ValueError):
        failure = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {name: {"error": failure[:300], "sessions": 0, "turns": 0} for name in CAPABILITIES}
    return report


def run_clients(clients: Sequence[Client]) -> dict[str, dict[str, Any]]:
    """Run each client in its environment against a server of its own; returns results by name."""
    results = {}
    for client in clients:
        try:
            command = prepare(client, FOLDER)
        except (subprocess.SubprocessError, OSError) as error:
            failed = {"error": f"not installed: {error}"[:300], "sessions": 0, "turns": 0}
            report: Report = dict.fromkeys(CAPABILITIES, failed)
        else:
            with serve() as server:
                report = run_script(command, server.url)
        results[client.name] = {**_describe(client), "capabilities": report}
        version = get_version(client.packages)
        print(format_row(client.name, version, report, CAPABILITIES), flush=True)
        if client.reference:
            with serve_reference() as url:
                known = run_script(command, url, REFERENCE)
            results[client.name]["reference"] = known
            row = format_row("  with the reference model", "", known, CAPABILITIES)
            print(row, flush=True)
    return results


def run_agents(agents: Sequence[Agent]) -> dict[str, dict[str, Any]]:
    """Run each agent's scenarios in its environment; returns results by name."""
    results = {}
    for agent in agents:
        try:
            binaries = prepare_agent(agent, FOLDER)
        except (subprocess.SubprocessError, OSError) as error:
            scenarios: Report = {"plain": {"error": f"not installed: {error}"[:300]}}
        else:
            scenarios = lab.run_agent(agent, binaries, FOLDER)
        results[agent.name] = {
            **_describe(agent),
            "scenarios": scenarios,
            "lacks": dict(agent.lacks),
        }
        version = get_version(agent.packages)
        print(format_row(agent.name, version, scenarios, tuple(SCENARIOS)), flush=True)
    return results


def _describe(client: Client | Agent) -> dict[str, Any]:
    return {"packages": list(client.packages), "date": datetime.now(UTC).date().isoformat()}


def format_row(
    name: str, version: str, report: Mapping[str, Mapping[str, Any]], columns: Sequence[str]
) -> str:
    """Format a client's row: per column `ok`, with its sessions where there are several."""
    cells = [_format_cell(report.get(each)) for each in columns]
    return f"{name:27} {version:10}" + "".join(f"{cell:16}" for cell in cells)


def _format_cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["error"]:
        return "FAILED"
    return "ok" if result.get("sessions", 1) == 1 else f"ok, {result['sessions']} sessions"


def main() -> int:
    """Run clients and agents and print their tables; the exit code is 1 if a capability failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "clients", nargs="*", help="parts of scripts' names or agents' keys; none: all"
    )
    chosen = parser.parse_args().clients
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    results = run_clients(
        [each for each in read_clients() if _is_chosen(each.script, chosen)]
    ) | run_agents([each for each in read_agents() if _is_chosen(each.key, chosen)])
    failures = _list_failures(results)
    print("", *failures, sep="\n")
    known = json.loads(RESULTS.read_text("utf-8")) if chosen else {}
    merged = {**known, **results}  # in the order of the files, whichever were run
    names = [each.name for each in read_agents()] + [each.name for each in read_clients()]
    text = json.dumps({name: merged[name] for name in names if name in merged}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    return int(bool(failures))


def _is_chosen(name: str, chosen: Sequence[str]) -> bool:
    return not chosen or any(part in name for part in chosen)


def _list_failures(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List what failed, a line each; below an agent's, what the server said to refused requests."""
    lines = []
    for name, each in results.items():
        for report in (each.get(kind, {}) for kind in ("capabilities", "reference", "scenarios")):
            for column, result in report.items():
                if result["error"]:
                    lines.append(f"{name}, {column}: {result['error']}")
                    lines += [f"    {refusal}" for refusal in result.get("refusals", ())]
    return lines


if __name__ == "__main__":
    sys.exit(main())
