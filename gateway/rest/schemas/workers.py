"""Workers: the served model and its limits, the methods, and the load of each worker."""

import json
from collections.abc import Iterable, Mapping

from gateway.rest.schemas.public import copy_to
from kvrecall import client
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo
from kvrecall.protocol.v1 import worker_pb2 as pb


def to_worker(info: WorkerInfo) -> client.Worker:
    """Convert the served model and its limits."""
    kinds = tuple(copy_to(client.LayerKind, kind) for kind in info.layer_kinds)
    return copy_to(client.Worker, info, layer_kinds=kinds)


def to_methods(info: WorkerInfo) -> client.Methods:
    """Convert the methods of a worker's description."""
    return client.Methods(
        methods=tuple(_to_method(method) for method in info.methods),
        repair=None if info.repair is None else _to_method(info.repair),
        prefill=None if info.prefill is None else _to_method(info.prefill),
        retrieve=None if info.retrieve is None else _to_method(info.retrieve),
    )


def to_workers(
    records: Iterable[pb.WorkerRecord], stats: Mapping[str, pb.WorkerStats]
) -> client.Workers:
    """Convert the workers' records, and the counters of the workers that answer, by name."""
    ordered = sorted(records, key=lambda record: record.name)
    loads = (
        copy_to(client.WorkerLoad, record, stats=_to_stats(stats.get(record.name)))
        for record in ordered
    )
    return client.Workers(tuple(loads))


def _to_method(method: MethodInfo) -> client.Method:
    schema = json.loads(method.settings_schema or "{}")
    return client.Method(method.name, method.summary, schema)


def _to_stats(stats: pb.WorkerStats | None) -> client.WorkerStats | None:
    """Convert the worker's counters; None for one that does not answer."""
    if stats is None:
        return None
    tiers = sorted(stats.tiers.items())
    return copy_to(
        client.WorkerStats,
        stats,
        tiers=tuple(copy_to(client.TierStats, tier, name=name) for name, tier in tiers),
    )
