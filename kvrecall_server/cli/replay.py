"""`kvrecall replay`: recorded conversations through a running service."""

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

from kvrecall.client import KvrecallClient
from kvrecall.domain.sessions.request import LEAST_REPAIR_ROWS
from kvrecall.domain.settings.methods import RECALL
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.cli.options import (
    MEASURED_BUDGET,
    Budget,
    Method,
    RepairRows,
    ServedModel,
    Url,
)
from kvrecall_server.replay.formats import read_recordings
from kvrecall_server.replay.playback import ReplayResult, SessionOptions, replay
from kvrecall_server.replay.recording import Recording
from kvrecall_server.replay.summary import (
    conversations_table,
    notes,
    result_rows,
    tiers_line,
    turns_table,
)
from kvrecall_server.reporting.results import build_results

FULL_ROWS = 16384


class Twin(StrEnum):
    """Sessions that the budgeted one can be compared with."""

    FULL = "full"


def replay_command(
    file: Annotated[
        Path,
        typer.Argument(help="LoCoMo or tau-bench file, or JSON lines of OpenAI-style messages."),
    ],
    url: Url = None,
    model: ServedModel = None,
    budget: Budget = MEASURED_BUDGET,
    method: Method = RECALL,
    repair_rows: RepairRows = LEAST_REPAIR_ROWS,
    repair_on: Annotated[
        list[RepairTrigger] | None,
        typer.Option(help="Repair trigger; repeatable. Default: tool_call and tool_result."),
    ] = None,
    compare: Annotated[
        Twin | None,
        typer.Option(help="Compare each turn's next-token distributions with this method's."),
    ] = None,
    full_rows: Annotated[
        int, typer.Option(min=1, help="Largest size of a full cache, in rows.")
    ] = FULL_ROWS,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of conversations. Default: all.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Replay recorded conversations under a budget.

    Tool calls become pauses with repair; recorded replies are appended without generating.
    """
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
        build_results("replay", 0, served, result_rows(replayed, options)).write(json)
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
) -> tuple[list[ReplayResult], str]:
    """Replay the first `limit` conversations of a file; returns them and the model's name.

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
) -> list[ReplayResult]:
    """Replay recordings one after the other, with a progress bar."""
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
            replayed.append(replay(client, recording, options))
            progress.advance(task)
        progress.update(task, description="replayed")
    return replayed


def show(console: Console, replayed: Sequence[ReplayResult]) -> None:
    """Print the results: a table by turn or by conversation, tier sizes, notes on split text."""
    console.print(turns_table(replayed[0]) if len(replayed) == 1 else conversations_table(replayed))
    console.print(tiers_line(replayed), highlight=False)
    for note in notes(replayed):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
