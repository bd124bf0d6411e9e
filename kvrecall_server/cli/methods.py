"""`kvrecall methods`: eviction methods and repair, with their settings."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall_server.app.progress import show_progress


def methods_command() -> None:
    """List the eviction methods and the settings of each, and the settings of repair."""
    with show_progress("loading the methods"):
        # torch takes seconds to import: other commands do without.
        from workers.methods import (
            METHODS,
            describe,
            describe_prefill,
            describe_repair,
            describe_retrieval,
        )

    table = Table("method", "rows it keeps, and its settings", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, method in METHODS.items():
        description = describe(name)
        lines = [
            f"layer budgets: {method.layer_budgets}",
            *format_settings(description.settings_schema),
        ]
        table.add_row(name, _text(description.summary, lines))
    console = Console()
    console.print(table)
    console.print(
        'A session selects one with "method" and "method_settings" of its "research"; "layer_budgets" '
        'overrides the method\'s split of the budget over the layers, and "reselect" selects the rows '
        "anew while an answer is generated, with any method that evicts.",
        highlight=False,
    )
    for setting, heading, described in (
        ("repair_settings", ("repair", "rows it promotes"), describe_repair()),
        ("prefill", ("prefill", "attention it leaves out"), describe_prefill()),
        ("retrieve", ("retrieval", "rows it reads for each token"), describe_retrieval()),
    ):
        kind, does = heading
        table = Table(kind, f"{does}, and its settings", box=box.SIMPLE_HEAD, pad_edge=False)
        settings = format_settings(described.settings_schema)
        table.add_row(described.name, _text(described.summary, settings))
        console.print(table)
        console.print(f'A session sets them with "{setting}" of its "research".', highlight=False)


def _text(summary: str, lines: Iterable[str]) -> Text:
    text = Text(summary)
    for line in lines:
        text.append(f"\n  {line}", style="dim")
    return text


def format_settings(schema: str) -> Iterator[str]:
    """Lines `name = default (range)` for the settings in a method's JSON schema."""
    for name, about in json.loads(schema).get("properties", {}).items():
        default = json.dumps(about.get("default"))
        yield " ".join([f"{name} = {default}", *_range(about)])


def _range(about: Mapping[str, Any]) -> Iterator[str]:
    if "enum" in about:
        yield f"({', '.join(map(str, about['enum']))})"
    elif "maximum" in about:
        yield f"({about.get('minimum', '')} to {about['maximum']})"
    elif "minimum" in about:
        yield f"(at least {about['minimum']})"
