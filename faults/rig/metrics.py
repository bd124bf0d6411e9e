"""Metrics of a process: its page as sums by name, and the page of a process that may not answer."""

from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families


def sum_metrics(page: str) -> dict[str, float]:
    """Metrics of a page by name, summed over labels; those of a tier as `name tier`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = " ".join([sample.name, *filter(None, [sample.labels.get("tier")])])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def read_metrics(url: str) -> dict[str, float]:
    """Sums of a process' metrics by name; empty if it does not answer."""
    with suppress(httpx.HTTPError):
        return sum_metrics(httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text)
    return {}
