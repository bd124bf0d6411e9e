"""`kvrecall doctor`: what is wrong with this machine, and what to do about it."""

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from kvrecall_server.app.start.diagnosis import Check, diagnose
from kvrecall_server.cli.options import (
    Data,
    Host,
    Json,
    MaxBudget,
    Model,
    Port,
    Slots,
    TensorParallel,
    build_settings,
)

_MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "wrong": ("WRONG", "bold red")}
FOUND_PROBLEMS = 1


def doctor_command(
    model: Model = None,
    data: Data = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    host: Host = None,
    port: Port = None,
    tensor_parallel: TensorParallel = None,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with this machine: versions, CPU, memory, disk, ports, server, Redis.

    Flags are those of `kvrecall serve` and `kvrecall worker`. Exit codes: 0 nothing is wrong, 1 something is.
    """
    settings = build_settings(
        model=model,
        data=data,
        host=host,
        port=port,
        tensor_parallel=tensor_parallel,
        worker={"slots": slots, "max_budget": budget},
    )
    console = Console()
    found = []
    for check in diagnose(settings):
        found.append(check)
        if not as_json:
            _print(console, check)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    raise typer.Exit(FOUND_PROBLEMS if any(each.result == "wrong" for each in found) else 0)


def _print(console: Console, check: Check) -> None:
    mark, style = _MARKS[check.result]
    line = Text.assemble((mark, style), f"  {check.name}: {check.found}")
    if check.advice:
        line.append(f"\n       {check.advice}")
    console.print(line, soft_wrap=True)
