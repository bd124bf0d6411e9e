"""`kvrecall replay`: recorded conversations through the running service."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvrecall.app.local_server import ServerNeeds, server_at
from kvrecall.app.settings import DEFAULTS
from kvrecall.client import KvrecallClient
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.replay.formats import read_recordings
from kvrecall.replay.playing import Replayed, SessionOptions, play
from kvrecall.replay.recording import Recording
from kvrecall.replay.summary import conversations_table, notes, result_rows, tiers_line, turns_table
from kvrecall.reporting.results import results_of

FULL_ROWS = 16384


class Twin(StrEnum):
    """What the budgeted session may be compared with."""

    FULL = "full"


def replay_command(
    file: Annotated[
        Path,
        typer.Argument(help="LoCoMo or tau-bench file, or JSON lines of OpenAI-style messages."),
    ],
    url: Annotated[
        str | None, typer.Option(help="A running server. Without it one is started.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of a server that is started.")
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Active rows of a session.")
    ] = DEFAULTS.default_budget,
    method: Annotated[str, typer.Option(help="Eviction method.")] = DEFAULTS.default_method,
    repair_rows: Annotated[
        int, typer.Option(min=0, help="Rows of the budget kept for repair.")
    ] = DEFAULTS.default_repair_rows,
    repair_on: Annotated[
        list[RepairTrigger] | None, typer.Option(help="Repeat for several. Default: the pauses.")
    ] = None,
    compare: Annotated[
        Twin | None, typer.Option(help="Compare each turn with a session of this method.")
    ] = None,
    full_rows: Annotated[
        int, typer.Option(min=1, help="Rows a full cache may grow to.")
    ] = FULL_ROWS,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first conversations.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result file here.")] = None,
) -> None:
    """Replay recorded conversations under a budget: tool calls are real pauses, recorded replies are remembered."""
    console = Console()
    triggers = repair_on or [RepairTrigger.TOOL_CALL, RepairTrigger.TOOL_RESULT]
    evicts = method != Twin.FULL
    options = SessionOptions(
        method, budget, repair_rows if evicts else 0, tuple(triggers), compare is not None
    )
    replayed, served = replay_file(
        file, options, console, url=url, model=model, full_rows=full_rows, limit=limit
    )
    show(console, replayed)
    if json is not None:
        results_of("replay", 0, served, result_rows(replayed, options)).write(json)
        console.print(f"wrote {json}", highlight=False, soft_wrap=True)


def replay_file(
    file: Path,
    options: SessionOptions,
    console: Console,
    *,
    url: str | None,
    model: str | None,
    full_rows: int,
    limit: int | None,
) -> tuple[list[Replayed], str]:
    """Replay a file's first `limit` conversations; returns them and the model's name.

    Raises BadReplayFile, ServerNotReady, KvrecallError.
    """
    recordings = read_recordings(file)[:limit]
    grows = options.compare or options.method == Twin.FULL
    rows = max(options.budget, full_rows) if grows else options.budget
    needs = ServerNeeds(model=model, slots=2 if options.compare else 1, max_budget=rows)
    with server_at(url, needs) as address, KvrecallClient(address) as client:
        replayed = _replay_all(client, recordings, options, console)
        return replayed, Path(client.worker().model).name


def _replay_all(
    client: KvrecallClient,
    recordings: Sequence[Recording],
    options: SessionOptions,
    console: Console,
) -> list[Replayed]:
    """Replay the recordings one after the other, with a progress bar."""
    columns = (
        TextColumn("{task.description:<28.28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    replayed = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(recordings))
        for recording in recordings:
            progress.update(task, description=recording.name)
            replayed.append(play(client, recording, options))
            progress.advance(task)
        progress.update(task, description="replayed")
    return replayed


def show(console: Console, replayed: Sequence[Replayed]) -> None:
    """The tables: by turn for one conversation, by conversation for more; then what was split or cut."""
    console.print(turns_table(replayed[0]) if len(replayed) == 1 else conversations_table(replayed))
    console.print(tiers_line(replayed), highlight=False)
    for note in notes(replayed):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
