"""`kvrecall demo`: the main job. A long conversation in a small budget, with and without repair."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrecall.app.local_server import ServerNeeds, server_at
from kvrecall.app.run import TEST_INSTRUMENT
from kvrecall.app.settings import DEFAULTS
from kvrecall.cli.replay import FULL_ROWS, replay_file, show
from kvrecall.client import KvrecallClient
from kvrecall.demo.arms import Arm, ArmRun, demo_arms, run_arm
from kvrecall.demo.summary import check_bound, result_rows, summarise
from kvrecall.demo.table import arms_table
from kvrecall.replay.playing import SessionOptions
from kvrecall.replay.summary import conversation_lines, notes
from kvrecall.reporting.html import Page
from kvrecall.reporting.results import results_of
from reference import MODEL_PATH
from reference.conversation import Conversation, generate

FIRST_SEED = 7000
MODEL_NAME = "kvrecall reference model"
# A full cache needs room for every token, and conversations come out a little longer than asked for.
FULL_CACHE_MARGIN = 1.3
REAL_INPUT = (
    "Recorded conversations, turn by turn, under the same budget: tool calls are pauses, recorded replies are "
    "remembered as they stand. KL (nats) and top-1 agreement compare the next-token distribution over the recorded "
    "replies with the full cache's. The reference model was never trained on such text."
)


def demo_command(
    file: Annotated[
        Path | None, typer.Option(help="Real input to replay afterwards (see kvrecall replay).")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=200, help="Length of a generated conversation.")
    ] = 9600,
    conversations: Annotated[int, typer.Option(min=1, help="Generated conversations.")] = 1,
    budget: Annotated[
        int, typer.Option(min=1, help="Active rows with a budget.")
    ] = DEFAULTS.default_budget,
    repair_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the budget that a repair may bring back.")
    ] = DEFAULTS.default_repair_rows,
    method: Annotated[str, typer.Option(help="Eviction method.")] = DEFAULTS.default_method,
    pause: Annotated[float, typer.Option(min=0, help="Seconds that a tool takes.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")] = FIRST_SEED,
    limit: Annotated[int, typer.Option(min=1, help="Conversations of the file.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("kvrecall-demo"),
) -> None:
    """Hold a long conversation under a small budget and count what is remembered, with and without repair."""
    console = Console()
    started = time.perf_counter()
    console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
    arms = demo_arms(method, budget, repair_rows)
    needs = ServerNeeds(
        model=str(MODEL_PATH), slots=2, max_budget=max(budget, int(tokens * FULL_CACHE_MARGIN))
    )
    with server_at(None, needs) as address, KvrecallClient(address) as client:
        spoken = [
            generate(seed + index, tokens, split="held_out") for index in range(conversations)
        ]
        runs = hold_all(client, arms, spoken, pause, console)
        page = _tell(console, client, runs, seed, out)
    path = out / "report.html"
    page.write(path)
    if file is not None:
        _replay(console, page, file, limit, arms[-1])
        page.write(path)
    check_bound(runs)
    console.print(f"{time.perf_counter() - started:.0f} seconds; the report is at", highlight=False)
    console.print(str(path.resolve()), style="bold", soft_wrap=True, highlight=False)


def hold_all(
    client: KvrecallClient,
    arms: Sequence[Arm],
    spoken: Sequence[Conversation],
    pause: float,
    console: Console,
) -> list[ArmRun]:
    """Every conversation in every arm, one after the other, so that times are an arm's own."""
    runs = []
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for conversation in spoken:
            for arm in arms:
                task = progress.add_task(arm.name, total=len(conversation.exchanges))
                runs.append(
                    run_arm(client, arm, conversation, pause, partial(progress.advance, task))
                )
    return runs


def _tell(
    console: Console, client: KvrecallClient, runs: Sequence[ArmRun], seed: int, out: Path
) -> Page:
    """Print the table, write the result file and put the page together."""
    # matplotlib takes a second to import: the other commands do without.
    from kvrecall.demo.report import demo_page

    summaries = summarise(runs, seed)
    console.print(
        arms_table(
            summaries, f"{summaries[0].tokens:,} tokens at a budget of {runs[-1].arm.budget} rows"
        )
    )
    results = results_of("demo", seed, MODEL_NAME, result_rows(runs, seed))
    results.write(out / "report.json")
    return demo_page(runs, summaries, client.worker(), results)


def _replay(console: Console, page: Page, file: Path, limit: int, arm: Arm) -> None:
    """The first conversations of a real file under the same budget, beside the full cache."""
    options = SessionOptions(arm.method, arm.budget, arm.repair_rows, arm.repair_on, compare=True)
    replayed, _ = replay_file(
        file, options, console, url=None, model=str(MODEL_PATH), full_rows=FULL_ROWS, limit=limit
    )
    show(console, replayed)
    page.heading(f"Real input: {file.name}")
    page.paragraph(REAL_INPUT)
    page.table(*conversation_lines(replayed))
    for note in notes(replayed):
        page.paragraph(note, "note")
