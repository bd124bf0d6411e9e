"""What Grafana does with a dashboard's queries: variables and intervals are filled in."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.operations.prometheus import PrometheusApi

Json = dict[str, Any]
# Longest first: Grafana knows no `$__rate`.
INTERVALS = {"$__rate_interval": "5m", "$__interval": "15s", "$__range": "1h"}


def find_expressions(dashboard: Json) -> Iterator[tuple[str, str]]:
    """Titles and expressions of all panels and annotations."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def fill_in(expression: str, values: Mapping[str, str]) -> str:
    """Fill variables and intervals in, as Grafana does before it asks."""
    for name, interval in INTERVALS.items():
        expression = expression.replace(name, interval)
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, f"unknown variable: {expression}"
    return expression


def read_variables(prometheus: PrometheusApi, dashboard: Json) -> dict[str, str]:
    """Values of a dashboard's variables with everything selected, as Grafana reads them."""
    values: dict[str, str] = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert asked is not None, variable["query"]
            match = {"match[]": fill_in(asked[1], values)}
            found = prometheus.ask(f"label/{asked[2]}/values", **match)
            assert found, f"variable {variable['name']} has no value"
            values[variable["name"]] = "|".join(found)
    return values
