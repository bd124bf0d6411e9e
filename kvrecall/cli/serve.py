"""`kvrecall serve`: the whole service in one process."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrecall.app.run import run_service, say_what_is_served, set_up_process
from kvrecall.app.settings import LogFormat, Settings
from kvrecall.cli.options import given

if TYPE_CHECKING:
    from services.service import SessionService


def serve_command(
    model: Annotated[
        str | None, typer.Option(help="Causal LM, by path or hub name. Default: the reference.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where sessions are kept. Default: ./kvrecall-data.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Sessions whose active rows are in memory.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Largest budget of a session, in rows.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens prefilled in one step.")] = None,
    ram: Annotated[
        int | None, typer.Option(min=1, help="MiB of rows in memory beside the files.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0: any free port. Default: 8420.")
    ] = None,
    log: Annotated[
        LogFormat | None, typer.Option(help="console or json, on standard error.")
    ] = None,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Serve sessions over HTTP; every setting can also come from the environment (KVRECALL_...)."""
    worker = {"slots": slots, "max_budget": budget, "block_tokens": block}
    chosen: dict[str, Any] = {
        "model": model,
        "data": data,
        "dtype": dtype,
        "host": host,
        "port": port,
        "log": log,
    }
    if ram is not None:
        chosen["ram_bytes"] = ram << 20
    settings = Settings(**given({**chosen, "worker": given(worker)}))
    set_up_process(settings, until_input_ends)
    console = Console()

    async def build() -> "SessionService":
        from kvrecall.app.local_service import (
            build_service,
        )  # with torch, which takes seconds to import

        say_what_is_served(settings, console)
        return await build_service(settings)

    asyncio.run(run_service(settings, console, build))
