"""Runs of the coding agents: each scenario with a server, a HOME and a folder of its own."""

import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.clients.agent_policy import answer
from tests.clients.environments import Agent
from tests.clients.exchanges import Exchange
from tests.clients.scenarios import SCENARIOS, Failed, Stage, make_files
from tests.clients.server import serve
from tests.clients.workplace import Workplace

SCENARIO_SECONDS = 240
"""The most that one run of an agent may take; a scenario has three runs at most."""
# Where an agent has to be refused for the scenario to have a meaning.
_REFUSED = ("compaction", "cancel")

Report = dict[str, Any]


def run_agent(agent: Agent, binaries: Sequence[Path], folder: Path) -> dict[str, Report]:
    """Run all scenarios that the agent has a mode for; returns a report for each."""
    return {
        name: run_scenario(agent, binaries, folder, name)
        for name in SCENARIOS
        if name not in agent.lacks
    }


def run_scenario(agent: Agent, binaries: Sequence[Path], folder: Path, name: str) -> Report:
    """Run one scenario in a new place in the folder, and report what came of it.

    `error` is None where the agent printed what it had to and nothing was refused that should not
    have been. Counts are of requests to generate: how they found their session, how many were
    refused, and the tokens of the last one that its session held before. `ignored` is what the
    server said that it left out, `refusals` what it said to the refused ones.
    """
    with (
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place,
        serve(answer) as server,
    ):
        error = None
        try:
            workplace = Workplace(
                agent,
                binaries,
                Path(place),
                server.url,
                server.worker.context,
                SCENARIO_SECONDS,
                make_files(),
            )
            with closing(workplace):
                SCENARIOS[name](Stage(workplace, server))
        except Failed as failure:
            error = str(failure)
        except subprocess.TimeoutExpired:
            error = f"took more than {SCENARIO_SECONDS} s"
        exchanges = list(server.exchanges)
    refused = [each for each in exchanges if not each.succeeded]
    if error is None and refused and name not in _REFUSED:
        error = f"{len(refused)} requests were refused or failed"
    return {"error": error, **_count(exchanges), "refusals": sorted(set(map(str, refused)))}


def _count(exchanges: Sequence[Exchange]) -> Report:
    left_out = {name for each in exchanges for name in each.ignored}
    return {
        "requests": len(exchanges),
        "matches": dict(sorted(Counter(each.match for each in exchanges if each.match).items())),
        "refused": sum(not each.succeeded for each in exchanges),
        "cached_tokens": exchanges[-1].cached_tokens if exchanges else 0,
        "ignored": sorted(left_out),
    }
