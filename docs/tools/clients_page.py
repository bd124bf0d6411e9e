"""The page of clients: what each could do when `make clients` ran last."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tables

CAPABILITIES = ("plain", "streamed", "turns", "tools", "streamed tools")
_INTRODUCTION = """# Clients

What each client could do when `make clients` ran last, unmodified, in an environment of its own, against
the application of `kvrecall serve` with a scripted worker. `turns` is a conversation of three requests,
`tools` a tool's call and the answer to its result. A conversation is one session; where a client repeats
its messages in other words or with other tools, the number of sessions is in brackets. A dash: the client
has no such mode. Clients that add no prompts of their own were also run against `kvrecall serve` with the
reference model: plain, streamed and in turns, without tools, as it was not trained on theirs. The file is
`benchmarks/results/clients.json`.

"""


def build(root: Path) -> str:
    """Build the page from the results."""
    results = json.loads((root / "benchmarks" / "results" / "clients.json").read_text("utf-8"))
    rows = [
        [name, ", ".join(f"`{package}`" for package in each["packages"])]
        + [_format(each["capabilities"].get(capability)) for capability in CAPABILITIES]
        + [_format_all(each.get("reference"))]
        for name, each in results.items()
    ]
    return _INTRODUCTION + tables.to_table(
        ["client", "packages", *CAPABILITIES, "reference model"], rows
    )


def _format(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["error"]:
        return "failed"
    return "yes" if result["sessions"] == 1 else f"yes ({result['sessions']})"


def _format_all(results: Mapping[str, Mapping[str, Any]] | None) -> str:
    """Format the capabilities of one model as one cell."""
    cells = [_format(result) for result in (results or {}).values()]
    return "yes" if cells and set(cells) == {"yes"} else ", ".join(cells) or "-"
