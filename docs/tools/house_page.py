"""The page of benchmarks/results/house.json: a line per measure, a column per version."""

import json
from collections import defaultdict
from pathlib import Path

from tables import to_table

INTRODUCTION = """# Measures of the source tree

`python -m benchmarks.house` takes them. `arrows up` are imports against the order of rooms that
[Architecture](../architecture.md) declares; an overloaded word is one of the everyday verbs that
carried several technical meanings each in 0.1.0. Types of the client count apart: it is installed
without the service, so it has to declare its values.
"""


def build(root: Path) -> str:
    """The page's text."""
    path = root / "benchmarks" / "results" / "house.json"
    by_metric: dict[str, dict[str, str]] = defaultdict(dict)
    for row in json.loads(path.read_text(encoding="utf-8"))["results"]:
        unit = " %" if row["unit"] == "%" else ""
        by_metric[row["metric"]][row["condition"]] = f"{row['median']:,g}{unit}"
    labels = sorted({label for values in by_metric.values() for label in values})
    rows = [[metric, *(v.get(label, "") for label in labels)] for metric, v in by_metric.items()]
    return f"{INTRODUCTION}\n{to_table(['measure', *labels], rows)}"
