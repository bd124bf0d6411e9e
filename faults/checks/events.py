"""Log events of a set-up's processes over all restarts: unlike metrics, logs survive every kill."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from faults.load.scripts import Json
from faults.rig.setups import Setup

REBUILT = "pages rebuilt"
# After a partition, a worker has written the pages that are only in its own files within this.
BACKLOG_SECONDS = 20.0
# Events that are logged for every request and start; turns and calls with the code "ok" are like them.
NOISE = ("request", "listening")
# Of a path in an event: it is the machine's.
_FOLDER = re.compile(r"/\S*/")


def events(setup: Setup) -> Counter[str]:
    """Number of log entries by level, event name and error code."""
    return Counter(_name(line) for line in _lines(setup) if not _is_noise(line))


def rebuilt(setup: Setup) -> Counter[str]:
    """Number of lost pages, and of lost states, that were recomputed, by session."""
    return _count_pages(line for line in _lines(setup) if line["event"] == REBUILT)


def rebuilt_without_cause(setup: Setup) -> Counter[str]:
    """Pages that were recomputed though no worker had been cut off from the others shortly before.

    Rows of a worker that does not reach Redis are durable in its own files alone: a session that
    moves away then is computed again. A fork whose parent has dropped the state that they shared has
    lost nothing: it is counted with none.
    """
    pages = _count_pages(
        line
        for line in _lines(setup)
        if line["event"] == REBUILT and not _was_cut_off(setup, line["timestamp"])
    )
    return +pages


def _was_cut_off(setup: Setup, timestamp: str) -> bool:
    at = datetime.fromisoformat(timestamp).timestamp()
    return any(begun < at < end + BACKLOG_SECONDS for begun, end in setup.cut_off)


def _count_pages(lines: Iterator[Json]) -> Counter[str]:
    pages: Counter[str] = Counter()
    for line in lines:
        pages[line["session"]] += len(line["pages"]) + line.get("states", 0)
    return pages


def _is_noise(line: Json) -> bool:
    return line["event"] in NOISE or line.get("code") == "ok"


def _name(line: Json) -> str:
    event = _FOLDER.sub("", line["event"])
    parts = (line.get("level"), event, line.get("code"))
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
