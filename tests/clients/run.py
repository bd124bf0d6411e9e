"""Run real clients, unmodified, against a scripted worker: `make clients`, a table, and a file.

Without arguments all clients of clients.toml, one after the other; with arguments those whose
script's name contains one of them. Those that add no prompts of their own are run against
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
from pathlib import Path
from typing import Any

import structlog

from tests.clients.environments import Client, prepare, read_clients
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
            with serve() as url:
                report = run_script(command, url)
        results[client.name] = {"packages": list(client.packages), "capabilities": report}
        print(format_row(client.name, client.version, report), flush=True)
        if client.reference:
            with serve_reference() as url:
                known = run_script(command, url, REFERENCE)
            results[client.name]["reference"] = known
            print(format_row("  with the reference model", "", known), flush=True)
    return results


def format_row(name: str, version: str, report: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a client's row: per capability `ok`, with its sessions where there are several."""
    cells = [_format_cell(report.get(each)) for each in CAPABILITIES]
    return f"{name:27} {version:10}" + "".join(f"{cell:16}" for cell in cells)


def _format_cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["error"]:
        return "FAILED"
    return "ok" if result["sessions"] == 1 else f"ok, {result['sessions']} sessions"


def main() -> int:
    """Run the clients and print the table; the exit code is 1 if a capability failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help="parts of scripts' names; none: all")
    chosen = parser.parse_args().clients
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    clients = [
        client
        for client in read_clients()
        if not chosen or any(part in client.script for part in chosen)
    ]
    print(f"{'client':27} {'version':10}" + "".join(f"{each:16}" for each in CAPABILITIES))
    results = run_clients(clients)
    failures = [
        (name, capability, result["error"])
        for name, each in results.items()
        for report in (each["capabilities"], each.get("reference", {}))
        for capability, result in report.items()
        if result["error"]
    ]
    for name, capability, error in failures:
        print(f"{name}, {capability}: {error}")
    known = json.loads(RESULTS.read_text("utf-8")) if chosen else {}
    RESULTS.write_text(json.dumps({**known, **results}, indent=1) + "\n", encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
