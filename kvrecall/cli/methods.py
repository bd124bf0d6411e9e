"""`kvrecall methods`: every eviction method with its settings."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def methods_command() -> None:
    """List the eviction methods that a session can choose, and their settings."""
    # torch takes seconds to import: other commands do without.
    from workers.methods import METHODS, describe

    table = Table("method", "what it keeps, and its settings", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, method in METHODS.items():
        found = describe(name)
        about = Text(found.summary)
        for line in [f"layer budgets: {method.layer_budgets}", *settings(found.settings_schema)]:
            about.append(f"\n  {line}", style="dim")
        table.add_row(name, about)
    console = Console()
    console.print(table)
    console.print(
        'A session chooses one with "method" and "method_settings"; its budget is split over the layers as the method '
        'has it, or as "layer_budgets" says.',
        highlight=False,
    )


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
