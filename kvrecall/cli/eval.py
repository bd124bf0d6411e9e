"""`kvrecall eval`: quality suites."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvrecall.app.models import REFERENCE
from kvrecall.cli.eval_run import (
    absolute_paths,
    build_setup,
    resolve_reference,
    run_suite,
    split_words,
)

# Each command imports its suite itself: torch takes seconds to import, which --help does without.

SEED = 9000
MQ_NIAH_SEED = 9100

Json = Annotated[
    Path,
    typer.Option("--json", help="Result file to write, with a journal and a plot beside it."),
]
Model = Annotated[
    str, typer.Option(help="Causal LM, by path or hub name; `reference`: the packaged one.")
]
Processes = Annotated[
    int, typer.Option(min=1, help="Parallel processes; results do not depend on it.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first conversation.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Discard the journal and run everything again.")
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        help=escape(
            "METHOD[+one_pass|+per_episode|+none][/MEDOIDS][@uniform|@pyramid|@sensitivity]"
            '[^stored|^active][~RETRIEVED][{"setting":value}]; several: separated by spaces, or repeat the option. '
            "Default: all."
        )
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(help="Rows per head, or shares of the history (1/8); several as in --methods."),
]
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        help='Codec of stored rows: raw, int8, or "raw int8" to compare. Default: raw.',
    ),
]
Conditions = Annotated[
    list[str] | None,
    typer.Option(
        "--condition", help="Condition to run beside the full cache; repeatable. Default: all."
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Recordings for real text (LoCoMo, tau-bench, SWE-agent, JSON lines): a file or a "
        "folder; repeatable. Default: generated text."
    ),
]
Block = Annotated[int, typer.Option(min=1, help="Tokens prefilled in one step.")]
Episodes = Annotated[str, typer.Option(help="Episodes per conversation: a number, or auto.")]

eval_app = typer.Typer(
    help="Quality suites: answer accuracy and fidelity by method and budget.", no_args_is_help=True
)


@eval_app.command("longconv")
def longconv_command(
    json: Json,
    model: Model = REFERENCE,
    conversations: Annotated[
        int, typer.Option("--limit", min=1, help="Number of conversations.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a conversation, in tokens.")] = 4096,
    topics: Annotated[int, typer.Option(min=2, max=12, help="Topics per conversation.")] = 8,
    questions: Annotated[int, typer.Option(min=1, max=42, help="Questions per conversation.")] = 32,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    codecs: Codecs = None,
    data: Data = None,
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Accuracy on early, middle and late facts of multi-topic conversations, by budget."""
    from evals.codecs import parse_codecs
    from evals.configs import parse_configs
    from evals.suites.longconv import suite as longconv

    setup = build_setup(model, "", seed, block, episodes)
    first = longconv.LongConv(setup, tokens, topics, questions, absolute_paths(data))
    chosen = split_words(budgets) or list(longconv.BUDGETS)
    kept = parse_codecs(split_words(codecs))
    run_suite(
        longconv.suite(first, parse_configs(split_words(methods)), chosen, conversations, kept),
        json,
        processes,
        fresh,
    )


@eval_app.command("passkey")
def passkey_command(
    json: Json,
    model: Model = REFERENCE,
    conversations: Annotated[int, typer.Option("--limit", min=1, help="Histories per length.")] = 4,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a history, in tokens; repeatable.")
    ] = None,
    depths: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Depth of the passkey, 0 to 1; repeatable."),
    ] = None,
    methods: Methods = None,
    budget: Annotated[str, typer.Option(help="Rows per head.")] = "256",
    episodes: Episodes = "4",
    data: Data = None,
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Accuracy on one fact in filler text by depth and length; a heat map per method."""
    from evals.configs import parse_configs
    from evals.suites import passkey

    setup = build_setup(model, budget, seed, block, episodes)
    places = (lengths or passkey.LENGTHS, depths or passkey.DEPTHS)
    run_suite(
        passkey.suite(
            setup, parse_configs(split_words(methods)), conversations, *places, absolute_paths(data)
        ),
        json,
        processes,
        fresh,
    )


@eval_app.command("fidelity")
def fidelity_command(
    json: Json,
    model: Model = REFERENCE,
    data: Data = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Recordings per source; 0: all, or 4 generated ones.")
    ] = 2,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per recording, at most the model's context.")
    ] = 6144,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Divergence from the full cache on recorded conversations, by method and budget."""
    from evals.configs import parse_configs
    from evals.suites import fidelity

    setup = build_setup(model, "", seed, block, episodes)
    chosen = split_words(budgets) or list(fidelity.BUDGETS)
    suite = fidelity.suite(
        setup, parse_configs(split_words(methods)), chosen, data or [], limit or None, tokens
    )
    run_suite(suite, json, processes, fresh)


@eval_app.command("methods")
def methods_command(
    json: Json,
    model: Model = REFERENCE,
    data: Data = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Recordings per source; 0: all, or 4 generated ones.")
    ] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a context, at most.")] = 1024,
    facts: Annotated[int, typer.Option(min=1, help="Facts planted in a context.")] = 4,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Recall of planted facts and divergence from the full cache, all methods and budgets."""
    from evals.configs import parse_configs
    from evals.suites.methods import suite as methods_suite

    setup = build_setup(model, "", seed, block, episodes)
    size = replace(methods_suite.SIZE, context=tokens, facts=facts)
    chosen = split_words(budgets) or list(methods_suite.BUDGETS)
    suite = methods_suite.suite(
        setup, parse_configs(split_words(methods)), chosen, data or [], limit or None, size
    )
    run_suite(suite, json, processes, fresh)


@eval_app.command("locomo")
def locomo_command(
    data: Annotated[Path, typer.Option(help="LoCoMo folder, or one file of it.")],
    json: Json,
    model: Annotated[
        str | None,
        typer.Option(help="Also score answers of this model: path, hub name or `reference`."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of conversations; 0: all.")] = 0,
    counts: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of episodes; repeatable. Default: 2 to 16."),
    ] = None,
    widths: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Utterances per segment; repeatable. Default: 2, 4, 8."),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Answered questions per conversation, at most.")
    ] = 50,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per conversation, at most the model's context.")
    ] = 1 << 20,
    methods: Methods = None,
    budgets: Budgets = None,
    episodes: Episodes = "4",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Share of a question's evidence in the matched episode, and F1 of answers (LoCoMo)."""
    from evals.configs import parse_configs
    from evals.suites.locomo import answers as locomo_answers
    from evals.suites.locomo import matching as locomo_matching
    from evals.suites.locomo import suite as locomo

    answers = []
    if model is not None:
        first = locomo_answers.Answering(
            build_setup(model, "", seed, block, episodes), "", questions, tokens
        )
        chosen = split_words(budgets) or list(locomo_answers.BUDGETS)
        answers = locomo.answering_units(
            first, data, limit or None, parse_configs(split_words(methods)), chosen
        )
    tried = (counts or locomo_matching.COUNTS, widths or locomo_matching.WIDTHS)
    run_suite(locomo.suite(data, limit or None, seed, *tried, answers), json, processes, fresh)


@eval_app.command("mq-niah")
def mq_niah_command(
    json: Json,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="2q, 4q, 6q, 8q (several: separated by spaces), revisit, policies or anytime."
        ),
    ] = None,
    model: Model = REFERENCE,
    cases: Annotated[
        int, typer.Option("--limit", min=1, help="Examples, each under all its partitions.")
    ] = 24,
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per context; 0: 2,000, for anytime 6,000.")
    ] = 0,
    distractors: Annotated[int, typer.Option(min=0, help="Facts that no question asks for.")] = 8,
    ks: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Restore budget K, in rows; repeatable.")
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            help="Base budget: a share of the context (1/8) or rows. Default: the suite's."
        ),
    ] = "",
    conditions: Conditions = None,
    codecs: Codecs = None,
    data: Data = None,
    seed: Seed = MQ_NIAH_SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Repair and its controls on facts that a later turn asks for (MQ-NIAH, RepairKV)."""
    from evals.codecs import parse_codecs
    from evals.suites.mq_niah import variants as mq_niah_suites
    from evals.suites.mq_niah.case import Protocol

    protocol = Protocol(
        resolve_reference(model), 0, base, tokens, distractors, data=absolute_paths(data)
    )
    names = tuple(split_words(suite) or ["4q"])
    kept = parse_codecs(split_words(codecs))
    chosen = mq_niah_suites.SuiteRequest(
        names, tuple(ks or ()), seed, cases, kept, tuple(conditions or ())
    )
    run_suite(mq_niah_suites.build_suite(protocol, chosen), json, processes, fresh)


@eval_app.command("repository")
def repository_command(
    json: Json,
    model: Model = REFERENCE,
    cases: Annotated[int, typer.Option("--limit", min=1, help="Number of call sites.")] = 48,
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per context; 0: 32,768, or half the model's context.")
    ] = 0,
    seed: Seed = MQ_NIAH_SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Repair for call sites in Python's standard library, with an event that describes the site."""
    from evals.suites.repository import suite as repository

    path = resolve_reference(model)
    run_suite(
        repository.suite(path, tokens or repository.context_tokens(path), seed, cases),
        json,
        processes,
        fresh,
    )


@eval_app.command("planted")
def planted_command(
    json: Json,
    model: Annotated[str, typer.Option(help="Causal LM that reads English, by path or hub name.")],
    data: Annotated[str, typer.Option(help="LoCoMo folder; generated small talk without it.")] = "",
    split: Annotated[
        str, typer.Option(help="tuning (defaults were chosen on it) or held_out.")
    ] = "held_out",
    cases: Annotated[int, typer.Option("--limit", min=1, help="Number of texts.")] = 48,
    facts: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=8,
            help="Facts asked for at once; repeatable: a text holds the most. Default: 1.",
        ),
    ] = None,
    results: Annotated[
        list[int] | None,
        typer.Option(
            "--result",
            min=50,
            help="Tokens of a tool's result with a question in it, as the signal; repeatable.",
        ),
    ] = None,
    result_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Recordings that these results are taken from: a file or a folder; repeatable. "
            "Default: generated."
        ),
    ] = None,
    conditions: Conditions = None,
    ks: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Restore budget K, in rows; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=200, help="Tokens per text.")] = 1000,
    budget: Annotated[int, typer.Option(min=64, help="Rows per head.")] = 256,
    method: Annotated[
        str, typer.Option(help="Eviction method, as in --methods of the other suites.")
    ] = "snapkv",
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Repair of facts planted in real text, by selection and contrast, at several K."""
    from evals.configs import parse_config
    from evals.suites.planted import suite as planted

    first = planted.Planted(
        model=resolve_reference(model),
        data=data,
        split=planted.parse_split(split),
        seed=seed,
        tokens=tokens,
        budget=budget,
        method=parse_config(method).name,
        result_data=absolute_paths(result_data),
        conditions=planted.choose_conditions(conditions or ()),
        block_tokens=block,
    )
    suite = planted.suite(first, facts or (1,), ks or planted.KS, cases, results or ())
    run_suite(suite, json, processes, fresh)
