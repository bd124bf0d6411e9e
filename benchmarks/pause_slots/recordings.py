"""Recorded agent runs: how long each turn of the model took, and the tool's pause behind it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Step:
    """A turn and the pause behind it, in seconds; `tool` is the name of the tool that is waited for."""

    turn_seconds: float
    pause_seconds: float
    tool: str


Run = tuple[Step, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs of OpenHands (`.jsonl`) and SWE-agent (`.traj`).

    SWE-agent's have pauses alone: their turns take the median of OpenHands' turns.
    """
    timed = [run for path in paths if path.suffix == ".jsonl" for run in _read_openhands(path)]
    seconds = median(step.turn_seconds for run in timed for step in run) if timed else 1.0
    untimed = [_read_swe_agent(path, seconds) for path in paths if path.suffix == ".traj"]
    return [run for run in (*timed, *untimed) if run]


def _read_openhands(path: Path) -> Iterator[Run]:
    for line in path.read_text("utf-8").splitlines():
        yield tuple(_follow(json.loads(line)["history"]))


def _follow(events: Sequence[dict[str, Any]]) -> Iterator[Step]:
    """Yield a step for each action of the agent that an observation answers."""
    asked: dict[str, tuple[datetime, datetime, str]] = {}
    last: datetime | None = None
    for event in events:
        at = datetime.fromisoformat(event["timestamp"])
        if event.get("source") == "agent" and "action" in event and last is not None:
            asked[str(event["id"])] = (last, at, event["action"])
        elif "observation" in event:
            found = asked.pop(str(event.get("cause")), None)
            last = at
            if found is not None:
                before, began, tool = found
                yield Step((began - before).total_seconds(), (at - began).total_seconds(), tool)


def _read_swe_agent(path: Path, turn_seconds: float) -> Run:
    recorded = json.loads(path.read_text("utf-8")).get("trajectory", [])
    return tuple(
        Step(turn_seconds, each["execution_time"], _name(each.get("action", "")))
        for each in recorded
        if "execution_time" in each
    )


def _name(action: str) -> str:
    words = action.split()
    return words[0] if words else ""
