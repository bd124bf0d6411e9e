"""The series that Prometheus has of a deployment: those of the catalogues, and its own."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import yaml

from gateway.metrics.catalogue import GATEWAY
from kvrecall.metrics.family import PREFIX, Family
from kvrecall.metrics.page import BUILD_INFO
from workers.metrics.catalogue import WORKER

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "observability" / "prometheus" / "alerts.yml"
TARGET = frozenset({"job", "instance"})
# Of the Prometheus client: of every process.
PROCESS = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds")


def get_series(families: Iterable[Family], *more: str) -> dict[str, frozenset[str]]:
    """Names of the series of families, with their labels and `more` ones."""
    series = {}
    for family in families:
        labels = TARGET | family.labels.keys() | set(more)
        name = PREFIX + family.name
        if family.kind == "histogram":
            series[f"{name}_bucket"] = labels | {"le"}
            series[f"{name}_sum"] = series[f"{name}_count"] = labels
        else:
            series[name] = labels
    return series


def get_records() -> list[str]:
    """Names of the recording rules."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


def get_all_series() -> Mapping[str, frozenset[str]]:
    """Every series that rules and panels may ask for, with its labels."""
    return MappingProxyType(
        get_series((BUILD_INFO, *GATEWAY))
        | get_series(WORKER, "worker")
        | dict.fromkeys(("up", *PROCESS), TARGET)
        | dict.fromkeys(get_records(), frozenset())
    )


def get_family(series: str) -> str:
    """Name of the family of a series of the catalogues."""
    for suffix in ("_bucket", "_sum", "_count"):
        if series.endswith(suffix):
            return series.removesuffix(suffix)
    return series


def get_families() -> set[str]:
    """Names of all families of the catalogues."""
    return {PREFIX + family.name for family in (BUILD_INFO, *GATEWAY, *WORKER)}
