"""The run of a quality suite for `kvrecall eval`: set-up, journal, result file, plot and tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from evals.reporting.eval_tables import build_tables
from kvrecall_server.app.models import is_reference, report_name
from kvrecall_server.app.run import TEST_INSTRUMENT
from kvrecall_server.reporting.results import Results, build_results
from reference import MODEL_PATH

if TYPE_CHECKING:
    from evals.harness import Setup
    from evals.suite import Suite

# Each function imports the suites itself: torch takes seconds to import, which --help does without.


def build_setup(model: str, budget: str, seed: int, block: int, episodes: str) -> "Setup":
    """The base set-up of a suite's runs, which the suite copies with its own configurations.

    Raises typer.BadParameter for `episodes` that are neither a number nor auto.
    """
    from evals.configs import FULL, parse_config
    from evals.harness import Setup
    from kvrecall.domain.settings.session import EpisodeSettings

    if episodes != "auto" and not (episodes.isdecimal() and int(episodes)):
        raise typer.BadParameter(f"{episodes!r} is neither a number of episodes nor auto")
    count: Any = episodes if episodes == "auto" else int(episodes)
    return Setup(
        resolve_reference(model),
        parse_config(FULL),
        budget,
        seed,
        block,
        EpisodeSettings(count=count),
    )


def run_suite(suite: "Suite[Any]", out: Path, processes: int, fresh: bool) -> None:
    """Run what the journal lacks, write the result file and its plot, print the tables."""
    from evals.runner import run

    console = Console()
    if is_reference(suite.model):
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
    journal = out.with_suffix(".journal.jsonl")
    if fresh:
        journal.unlink(missing_ok=True)
    rows = suite.rows(run(suite, journal, console, processes))
    results = build_results(suite.name, suite.seed, report_name(suite.model), rows)
    results.write(out)
    _show(console, results, out)


def _show(console: Console, results: Results, out: Path) -> None:
    # matplotlib takes a second to import.
    from evals.reporting.eval_plots import build_figure
    from kvrecall_server.reporting.figures import png

    for table in build_tables(results):
        console.print(table)
    plot = out.with_suffix(".png")
    if figure := build_figure(results):
        png(figure, plot)
    for written in (out, plot) if figure else (out,):
        console.print(f"written: {written}", highlight=False, soft_wrap=True)


def resolve_reference(model: str) -> str:
    """The model as the journals name it: the reference model by its folder, others as given."""
    return str(MODEL_PATH) if is_reference(model) else model


def absolute_paths(sources: list[Path] | None) -> tuple[str, ...]:
    """The paths of an option, which a journal can be resumed with from any folder."""
    return tuple(str(source.absolute()) for source in sources or ())


def split_words(options: list[str] | None) -> list[str]:
    """The words of all options: one option may have several, separated by spaces."""
    return [word for option in options or () for word in option.split()]
