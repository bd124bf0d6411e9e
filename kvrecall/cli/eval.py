"""`kvrecall eval`: the quality suites."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrecall.app.run import TEST_INSTRUMENT
from kvrecall.reporting.eval_tables import tables_of
from kvrecall.reporting.results import Results, results_of
from reference import MODEL_PATH

if TYPE_CHECKING:
    from evals.harness import Setup
    from evals.suite import Suite

# Each command imports its suite itself: torch takes seconds, which a look at --help should not cost.

REFERENCE = "reference"
MODEL_NAME = "kvrecall reference model"
SEED = 9000
MQ_NIAH_SEED = 9100

Json = Annotated[
    Path,
    typer.Option("--json", help="The result file; a journal and a picture are kept beside it."),
]
Model = Annotated[
    str, typer.Option(help="Causal LM, by path or hub name; `reference`: the packaged one.")
]
Processes = Annotated[
    int, typer.Option(min=1, help="Units of work at once; the numbers do not depend on it.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Run everything again, whatever the journal has.")
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        help='METHOD[+one_pass|+per_episode|+none][@uniform|@pyramid|@sensitivity][{"setting":value}], several with '
        "spaces between or the option repeated. Default: all."
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(help="Rows per head, or shares of the history (1/8), several as --methods."),
]
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        help='How rows are stored: raw, int8, or "raw int8" to compare them. Default: raw.',
    ),
]
Block = Annotated[int, typer.Option(min=1, help="Tokens prefilled in one step.")]
Episodes = Annotated[str, typer.Option(help="Episodes of a conversation: a number, or auto.")]

eval_app = typer.Typer(
    help="Quality suites: what is still known under every method and budget.", no_args_is_help=True
)


@eval_app.command("longconv")
def longconv_command(
    json: Json,
    model: Model = REFERENCE,
    conversations: Annotated[int, typer.Option("--limit", min=1, help="Conversations.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a conversation.")] = 4096,
    topics: Annotated[int, typer.Option(min=2, max=12, help="Topics of a conversation.")] = 8,
    questions: Annotated[
        int, typer.Option(min=1, max=42, help="Questions of a conversation.")
    ] = 32,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    codecs: Codecs = None,
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Questions on early, middle and late facts of conversations on several topics; accuracy against budget."""
    from evals.codecs import parse_codecs
    from evals.configs import parse_configs
    from evals.suites.longconv import suite as longconv

    first = longconv.LongConv(_setup(model, "", seed, block, episodes), tokens, topics, questions)
    chosen = _words(budgets) or list(longconv.BUDGETS)
    kept = parse_codecs(_words(codecs))
    _run(
        longconv.suite(first, parse_configs(_words(methods)), chosen, conversations, kept),
        json,
        processes,
        fresh,
    )


@eval_app.command("passkey")
def passkey_command(
    json: Json,
    model: Model = REFERENCE,
    conversations: Annotated[
        int, typer.Option("--limit", min=1, help="Histories of each length.")
    ] = 4,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a history; repeat for several.")
    ] = None,
    depths: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="Places of the fact, 0 to 1.")
    ] = None,
    methods: Methods = None,
    budget: Annotated[str, typer.Option(help="Rows per head.")] = "256",
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """One fact among small talk, by its depth and the history's length; a heat map per method."""
    from evals.configs import parse_configs
    from evals.suites import passkey

    setup = _setup(model, budget, seed, block, episodes)
    places = (lengths or passkey.LENGTHS, depths or passkey.DEPTHS)
    _run(
        passkey.suite(setup, parse_configs(_words(methods)), conversations, *places),
        json,
        processes,
        fresh,
    )


@eval_app.command("fidelity")
def fidelity_command(
    data: Annotated[
        list[Path],
        typer.Option(help="LoCoMo's folder, tau-bench's file; see replay. Repeat for more."),
    ],
    json: Json,
    model: Model = REFERENCE,
    limit: Annotated[int, typer.Option(min=0, help="Recordings of each source; 0: all.")] = 2,
    tokens: Annotated[
        int, typer.Option(min=1, help="Of a recording, as far as the context goes.")
    ] = 6144,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Recorded conversations under every method and budget: how far each turn is from the full cache."""
    from evals.configs import parse_configs
    from evals.suites import fidelity

    setup = _setup(model, "", seed, block, episodes)
    chosen = _words(budgets) or list(fidelity.BUDGETS)
    suite = fidelity.suite(
        setup, parse_configs(_words(methods)), chosen, data, limit or None, tokens
    )
    _run(suite, json, processes, fresh)


@eval_app.command("locomo")
def locomo_command(
    data: Annotated[Path, typer.Option(help="LoCoMo's folder, or one file of it.")],
    json: Json,
    model: Annotated[
        str | None,
        typer.Option(help="Let this model answer as well: path, hub name or `reference`."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Conversations; 0: all.")] = 0,
    counts: Annotated[
        list[int] | None, typer.Option(min=1, help="Episodes. Default: 2 to 16.")
    ] = None,
    widths: Annotated[
        list[int] | None, typer.Option(min=1, help="Lines of a segment. Default: 2, 4, 8.")
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Answered of a conversation, at most.")
    ] = 50,
    tokens: Annotated[
        int, typer.Option(min=1, help="Of a conversation, as far as the context goes.")
    ] = 1 << 20,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Real conversations: whether the matched episode holds a question's evidence; F1 of a model's answers."""
    from evals.configs import parse_configs
    from evals.suites.locomo import answers as locomo_answers
    from evals.suites.locomo import matching as locomo_matching
    from evals.suites.locomo import suite as locomo

    answers = []
    if model is not None:
        first = locomo_answers.Answering(
            _setup(model, "", seed, block, episodes), "", questions, tokens
        )
        chosen = _words(budgets) or list(locomo_answers.BUDGETS)
        answers = locomo.answering_units(
            first, data, limit or None, parse_configs(_words(methods)), chosen
        )
    tried = (counts or locomo_matching.COUNTS, widths or locomo_matching.WIDTHS)
    _run(locomo.suite(data, limit or None, seed, *tried, answers), json, processes, fresh)


@eval_app.command("mq-niah")
def mq_niah_command(
    json: Json,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="2q, 4q, 6q, 8q, of these several with spaces between; or revisit, policies, anytime."
        ),
    ] = None,
    model: Model = REFERENCE,
    cases: Annotated[
        int, typer.Option("--limit", min=1, help="Cases: examples, each under its partitions.")
    ] = 24,
    tokens: Annotated[
        int, typer.Option(min=0, help="Of a context; 0: 2,000, of anytime 6,000.")
    ] = 0,
    distractors: Annotated[int, typer.Option(min=0, help="Facts that nobody asks for.")] = 8,
    ks: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Restore budgets; repeat for several.")
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            help="Base budget: a share of the context (1/8) or rows. Default: each suite's."
        ),
    ] = "",
    codecs: Codecs = None,
    seed: Seed = MQ_NIAH_SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Facts that the second turn asks for, after the cache was compressed for the first: repair and its controls."""
    from evals.codecs import parse_codecs
    from evals.suites.mq_niah import variants as mq_niah_suites
    from evals.suites.mq_niah.case import Protocol

    protocol = Protocol(_path_of(model), 0, base, tokens, distractors)
    names = tuple(_words(suite) or ["4q"])
    kept = parse_codecs(_words(codecs))
    chosen = mq_niah_suites.SuiteRequest(names, tuple(ks or ()), seed, cases, kept)
    _run(mq_niah_suites.build_suite(protocol, chosen), json, processes, fresh)


@eval_app.command("repository")
def repository_command(
    json: Json,
    model: Model = REFERENCE,
    cases: Annotated[int, typer.Option("--limit", min=1, help="Call sites.")] = 48,
    tokens: Annotated[
        int, typer.Option(min=0, help="Of a context; 0: 32,768, or half of what the model reads.")
    ] = 0,
    seed: Seed = MQ_NIAH_SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """A name that was taken out of a place in Python's standard library, and an event that describes the place."""
    from evals.suites.repository import suite as repository

    path = _path_of(model)
    _run(
        repository.suite(path, tokens or repository.context_tokens(path), seed, cases),
        json,
        processes,
        fresh,
    )


def _setup(model: str, budget: str, seed: int, block: int, episodes: str) -> "Setup":
    """What the units of a suite have in common; the suite puts its own arms in the place of the full cache."""
    from evals.configs import FULL, parse_config
    from evals.harness import Setup
    from kvrecall.domain.session_settings import EpisodeSettings

    if episodes != "auto" and not (episodes.isdecimal() and int(episodes)):
        raise typer.BadParameter(f"{episodes!r} is neither a number of episodes nor auto")
    count: Any = episodes if episodes == "auto" else int(episodes)
    return Setup(
        _path_of(model), parse_config(FULL), budget, seed, block, EpisodeSettings(count=count)
    )


def _run(suite: "Suite[Any]", out: Path, processes: int, fresh: bool) -> None:
    """Run what the journal does not have, write the result file and its picture, show the table."""
    from evals.runner import run

    console = Console()
    is_reference = suite.model == str(MODEL_PATH)
    if is_reference:
        console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
    journal = out.with_suffix(".journal.jsonl")
    if fresh:
        journal.unlink(missing_ok=True)
    rows = suite.rows(run(suite, journal, console, processes))
    results = results_of(
        suite.name, suite.seed, MODEL_NAME if is_reference else Path(suite.model).name, rows
    )
    results.write(out)
    _show(console, results, out)


def _show(console: Console, results: Results, out: Path) -> None:
    # matplotlib takes a second to import.
    from kvrecall.reporting.eval_plots import figure_of
    from kvrecall.reporting.figures import png

    for table in tables_of(results):
        console.print(table)
    picture = out.with_suffix(".png")
    if figure := figure_of(results):
        png(figure, picture)
    for written in (out, picture) if figure else (out,):
        console.print(f"written: {written}", highlight=False, soft_wrap=True)


def _path_of(model: str) -> str:
    return str(MODEL_PATH) if model == REFERENCE else model


def _words(options: list[str] | None) -> list[str]:
    """Each option's words: several may stand in one."""
    return [word for option in options or () for word in option.split()]
