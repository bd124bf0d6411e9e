"""`kvrecall methods`: every eviction method with its settings, and those of repair."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def methods_command() -> None:
    """List the eviction methods that a session can choose, how it can be repaired, and the settings of each."""
    # torch takes seconds to import: other commands do without.
    from workers.methods import METHODS, describe, describe_repair

    table = Table("method", "what it keeps, and its settings", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, method in METHODS.items():
        found = describe(name)
        lines = [f"layer budgets: {method.layer_budgets}", *settings(found.settings_schema)]
        table.add_row(name, _about(found.summary, lines))
    repair = describe_repair()
    repairs = Table(
        "repair", "what it brings back, and its settings", box=box.SIMPLE_HEAD, pad_edge=False
    )
    repairs.add_row(repair.name, _about(repair.summary, settings(repair.settings_schema)))
    console = Console()
    console.print(table)
    console.print(
        'A session chooses one with "method" and "method_settings"; its budget is split over the layers as the method '
        'has it, or as "layer_budgets" says.',
        highlight=False,
    )
    console.print(repairs)
    console.print('A session changes them with "repair_settings".', highlight=False)


def _about(summary: str, lines: Iterable[str]) -> Text:
    about = Text(summary)
    for line in lines:
        about.append(f"\n  {line}", style="dim")
    return about


def settings(schema: str) -> Iterator[str]:
    """Each setting of a method's JSON schema as `name = default` with what it may be."""
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
