"""What the processes of a set-up logged, all lives of them together: that outlives every kill, as no metric does."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.scripts import Json
from benchmarks.faults.setups import Setup

REBUILT = "pages rebuilt"
NOISE = ("request",)


def events(setup: Setup) -> Counter[str]:
    """How often each event was logged, by level and name; codes beside it where it has one."""
    return Counter(_name(line) for line in _lines(setup) if line["event"] not in NOISE)


def rebuilt(setup: Setup) -> Counter[str]:
    """How many lost pages were computed again, by session."""
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
                found: Any = json.loads(text)
            except ValueError:
                continue
            if isinstance(found, dict) and "event" in found:
                yield found
