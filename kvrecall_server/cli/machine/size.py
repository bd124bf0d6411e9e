"""`kvrecall size`: memory and disk that a model and its sessions take, before anything is bought."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvrecall_server.app.errors import CannotServe, CliError
from kvrecall_server.app.models import resolve_model
from kvrecall_server.app.progress import show_progress
from kvrecall_server.cli.options import (
    Dtype,
    Json,
    MaxBudget,
    Model,
    Slots,
    TensorParallel,
    build_settings,
)
from kvrecall_server.cli.tables import print_table
from kvrecall_server.reporting.units import readable_bytes
from workers.errors import ModelRefused

if TYPE_CHECKING:
    from kvrecall_server.app.settings import Settings
    from kvrecall_server.app.start.sizing import Load, Sizes


class BadLoad(CliError):
    """More tokens are shared than a session has."""


def size_command(
    model: Model = None,
    sessions: Annotated[int, typer.Option(min=1, help="Stored sessions.")] = 1000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 32_768,
    shared: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens that all sessions begin with, as system prompt and tools."
        ),
    ] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each session.")] = 64,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sessions that have a turn at the same time. Default: the slots of a worker.",
        ),
    ] = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    dtype: Dtype = None,
    tensor_parallel: TensorParallel = None,
    as_json: Json = False,
) -> None:
    """Compute what a model, the sessions in its slots and all stored ones take, from its config.

    No weight is loaded. Tiers and codecs of pages, and the catalog, are those of the settings. Of a worker
    of several ranks, each has a device with its part of weights and active rows.
    """
    # torch takes seconds to import: other commands do without.
    from kvrecall_server.app.start.sizing import Load

    if shared > tokens:
        raise BadLoad(f"--shared is {shared:,} tokens, at most the {tokens:,} of a session")
    settings = build_settings(
        model=model,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        worker={"slots": slots, "max_budget": budget},
    )
    load = Load(sessions, tokens, shared, turns, at_once or settings.worker.slots)
    with show_progress(f"reading the config of {settings.model}"):
        sizes = _measure(settings, load)
    if as_json:
        print(json.dumps(asdict(sizes), indent=1))
        return
    _print(sizes, settings)


def _print(sizes: "Sizes", settings: "Settings") -> None:
    rows = [
        [
            each.what,
            f"{each.count:,}",
            readable_bytes(each.each_bytes),
            readable_bytes(each.total_bytes),
            each.where,
        ]
        for each in sizes.needs
    ]
    print_table(("of", "count", "each", "in all", "where"), rows)
    slots = settings.worker.slots
    devices = sizes.workers * settings.tensor_parallel
    print(
        f"\n{sizes.at_once:,} sessions with a turn at once: {_count(sizes.workers, 'worker')} of "
        f"{_count(slots, 'slot')}, {_count(devices, 'device')} with "
        f"{readable_bytes(sizes.device_bytes)} each for weights and active rows\n"
        f"--ram {-(-sizes.ram_bytes >> 20)} (MiB) holds the rows of {slots} such sessions; with less, "
        "rows of the longest idle ones are read from the files again"
    )
    limit = settings.service.tenant_catalog_bytes
    if sizes.needs[-1].total_bytes > limit:
        print(
            f"one tenant may have {readable_bytes(limit)} of the catalog: raise "
            "KVRECALL_SERVICE__TENANT_CATALOG_BYTES, or keep fewer states for forks "
            "(KVRECALL_SERVICE__KEPT_STATES)"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _measure(settings: "Settings", load: "Load") -> "Sizes":
    """Measure what the load takes. Raises CannotServe."""
    import torch

    from kvrecall_server.app.start.sizing import Deployment, add_up
    from workers.model.sizes import read_sizes

    dtype: torch.dtype | None = None if settings.dtype is None else getattr(torch, settings.dtype)
    deployment = Deployment.of(settings)
    try:
        model = read_sizes(resolve_model(settings.model), dtype, deployment.ranks)
    except ModelRefused as error:
        raise CannotServe(str(error)) from error
    return add_up(model, load, deployment)
