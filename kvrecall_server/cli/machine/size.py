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
    from kvrecall_server.app.start.sizing import Need


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
    slots: Slots = None,
    budget: MaxBudget = None,
    dtype: Dtype = None,
    tensor_parallel: TensorParallel = None,
    as_json: Json = False,
) -> None:
    """Compute what a model, the sessions in its slots and all stored ones take, from its config.

    No weight is loaded. Codecs of pages are those of the settings. Of a worker of several ranks, each has a
    device with its part of weights and active rows.
    """
    if shared > tokens:
        raise BadLoad(f"--shared is {shared:,} tokens, at most the {tokens:,} of a session")
    settings = build_settings(
        model=model,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        worker={"slots": slots, "max_budget": budget},
    )
    with show_progress(f"reading the config of {settings.model}"):
        needs, ram = _measure(settings, sessions, tokens, shared)
    if as_json:
        print(json.dumps({"needs": [asdict(each) for each in needs], "ram_bytes": ram}, indent=1))
        return
    rows = [
        [
            each.what,
            f"{each.count:,}",
            readable_bytes(each.each_bytes),
            readable_bytes(each.total_bytes),
            each.where,
        ]
        for each in needs
    ]
    print_table(("of", "count", "each", "in all", "where"), rows)
    print(
        f"\n--ram {-(-ram >> 20)} (MiB) holds the rows of {settings.worker.slots} such sessions; with less, "
        "rows of the longest idle ones are read from the files again"
    )


def _measure(
    settings: "Settings", sessions: int, tokens: int, shared: int
) -> tuple[list["Need"], int]:
    """Return the needs, and the bytes of `--ram`. Raises CannotServe."""
    # torch takes seconds to import: other commands do without.
    import torch

    from kvrecall_server.app.start.sizing import Load, get_ram_setting, list_needs
    from workers.model.sizes import read_sizes

    ranks = settings.tensor_parallel
    load = Load(sessions, tokens, shared, settings.store.codecs[-1], ranks)
    dtype: torch.dtype | None = None if settings.dtype is None else getattr(torch, settings.dtype)
    try:
        sizes = read_sizes(resolve_model(settings.model), dtype, ranks)
    except ModelRefused as error:
        raise CannotServe(str(error)) from error
    needs = list(list_needs(sizes, settings.worker, load))
    return needs, get_ram_setting(sizes, settings.worker, load)
