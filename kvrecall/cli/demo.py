"""`kvrecall demo`: a long conversation under a small budget, with and without repair."""

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
from kvrecall.cli.options import Budget, Method
from kvrecall.cli.replay import FULL_ROWS, replay_file, show
from kvrecall.client import KvrecallClient
from kvrecall.demo.configs import DemoConfig, demo_configs
from kvrecall.demo.run import DemoRun, run_config
from kvrecall.demo.summary import check_bound, result_rows, summarise, summary_table
from kvrecall.replay.playback import SessionOptions
from kvrecall.replay.summary import conversation_lines, notes
from kvrecall.reporting.html import Page
from kvrecall.reporting.results import build_results
from reference import MODEL_PATH
from reference.conversation import Conversation, generate

FIRST_SEED = 7000
MODEL_NAME = "kvrecall reference model"
# A full cache holds every token; conversations are a little longer than requested.
FULL_CACHE_MARGIN = 1.3
REAL_INPUT = (
    "Recorded conversations, turn by turn, under the same budget: tool calls are pauses, recorded "
    "replies are appended unchanged. KL (nats) and top-1 agreement compare the next-token "
    "distributions over the recorded replies with the full cache's. The reference model was not "
    "trained on such text."
)


def demo_command(
    file: Annotated[
        Path | None, typer.Option(help="Recorded conversations to replay afterwards.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=200, help="Length of a generated conversation, in tokens.")
    ] = 9600,
    conversations: Annotated[
        int, typer.Option(min=1, help="Number of generated conversations.")
    ] = 1,
    budget: Budget = DEFAULTS.default_budget,
    repair_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the budget reserved for repair (promoted rows).")
    ] = DEFAULTS.default_repair_rows,
    method: Method = DEFAULTS.default_method,
    pause: Annotated[float, typer.Option(min=0, help="Duration of a tool call, in seconds.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")] = FIRST_SEED,
    limit: Annotated[int, typer.Option(min=1, help="Number of conversations of --file.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("kvrecall-demo"),
) -> None:
    """Run a long conversation under a small budget and count correct answers.

    The configurations: full cache, budget alone, repair in pauses, repair in pauses and turns.
    """
    console = Console()
    started = time.perf_counter()
    console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
    configs = demo_configs(method, budget, repair_rows)
    needs = ServerNeeds(
        model=str(MODEL_PATH), slots=2, max_budget=max(budget, int(tokens * FULL_CACHE_MARGIN))
    )
    with server_at(None, needs) as address, KvrecallClient(address) as client:
        generated = [
            generate(seed + index, tokens, split="held_out") for index in range(conversations)
        ]
        runs = run_all(client, configs, generated, pause, console)
        page = _report(console, client, runs, seed, out)
    path = out / "report.html"
    page.write(path)
    if file is not None:
        _replay(console, page, file, limit, configs[-1])
        page.write(path)
    check_bound(runs)
    console.print(f"{time.perf_counter() - started:.0f} seconds; the report is at", highlight=False)
    console.print(str(path.resolve()), style="bold", soft_wrap=True, highlight=False)


def run_all(
    client: KvrecallClient,
    configs: Sequence[DemoConfig],
    conversations: Sequence[Conversation],
    pause: float,
    console: Console,
) -> list[DemoRun]:
    """Run every conversation in every configuration, one at a time, for undisturbed timings."""
    runs = []
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for conversation in conversations:
            for config in configs:
                task = progress.add_task(config.name, total=len(conversation.exchanges))
                runs.append(
                    run_config(client, config, conversation, pause, partial(progress.advance, task))
                )
    return runs


def _report(
    console: Console, client: KvrecallClient, runs: Sequence[DemoRun], seed: int, out: Path
) -> Page:
    """Print the table, write the result file and build the report page."""
    # matplotlib takes a second to import: the other commands do without.
    from kvrecall.demo.report import demo_page

    summaries = summarise(runs, seed)
    console.print(
        summary_table(
            summaries,
            f"{summaries[0].tokens:,} tokens at a budget of {runs[-1].config.budget} rows",
        )
    )
    results = build_results("demo", seed, MODEL_NAME, result_rows(runs, seed))
    results.write(out / "report.json")
    return demo_page(runs, summaries, client.worker(), results)


def _replay(console: Console, page: Page, file: Path, limit: int, config: DemoConfig) -> None:
    """Replay conversations of a file under the same budget, compared with a full cache."""
    options = SessionOptions(
        config.method, config.budget, config.repair_rows, config.repair_on, compare=True
    )
    replayed, _ = replay_file(
        file, options, console, url=None, model=str(MODEL_PATH), full_rows=FULL_ROWS, limit=limit
    )
    show(console, replayed)
    page.heading(f"Real input: {file.name}")
    page.paragraph(REAL_INPUT)
    page.table(*conversation_lines(replayed))
    for note in notes(replayed):
        page.paragraph(note, "note")
