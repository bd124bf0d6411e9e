"""Log events of a set-up's processes over all restarts: unlike metrics, logs survive every kill."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.load.scripts import Json
from benchmarks.faults.rig.setups import Setup

REBUILT = "pages rebuilt"
# Events that are logged for every request.
NOISE = ("request",)


def events(setup: Setup) -> Counter[str]:
    """Number of log entries by level, event name and error code."""
    return Counter(_name(line) for line in _lines(setup) if line["event"] not in NOISE)


def rebuilt(setup: Setup) -> Counter[str]:
    """Number of lost pages that were recomputed, by session."""
    pages: Counter[str] = Counter()
    for line in _lines(setup):
        if line["event"] == REBUILT:
            pages[line["session"]] += len(line["pages"])
    return pages


def _name(line: Json) -> str:
    parts = (line.get("level"), line["event"], line.get("code"))
    return " ".join(str(part) for part in parts if part)


def _lines(setup: Setup) -> Iterator[Json]:
    for server in setup.servers:
        for text in server.log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry: Any = json.loads(text)
            except ValueError:
                continue
            if isinstance(entry, dict) and "event" in entry:
                yield entry
