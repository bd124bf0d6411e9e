"""`kvrecall eval` for eviction: answers and fidelity by method and budget."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvrecall_server.app.models import REFERENCE
from kvrecall_server.cli.eval.options import (
    SEED,
    Block,
    Budget,
    Budgets,
    Chunks,
    Codecs,
    Data,
    Episodes,
    Fresh,
    Json,
    Limit,
    Methods,
    Model,
    Processes,
    Seed,
)
from kvrecall_server.cli.eval.run import absolute_paths, build_setup, run_suite, split_words

# Each command imports its suite itself: torch takes seconds to import, which --help does without.


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
    budget: Budget = "256",
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


def ages_command(
    json: Json,
    model: Model = REFERENCE,
    conversations: Annotated[
        int, typer.Option("--limit", min=1, help="Conversations per length.")
    ] = 4,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Length of a conversation, in tokens; repeatable. Default: 16,000, 48,000."
        ),
    ] = None,
    facts: Annotated[int, typer.Option(min=1, max=42, help="Facts in a conversation.")] = 42,
    at: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Age of facts, in windows of the model; repeatable. Default: all ages."
        ),
    ] = None,
    corrected: Annotated[
        Literal["no", "marked", "unmarked"],
        typer.Option(help="Give facts another value later, in words that say so or not."),
    ] = "no",
    methods: Methods = None,
    budget: Budget = "256",
    chunks: Chunks = None,
    block: Block = 256,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Accuracy on facts by their age in conversations that are longer than the model's window."""
    from evals.configs import parse_configs
    from evals.suites import ages

    setup = build_setup(model, budget, seed, block, "4")
    configs = parse_configs(split_words(methods) or list(ages.CONFIGS))
    sizes = (lengths or ages.LENGTHS, facts, chunks or [0], at or ())
    run_suite(ages.suite(setup, configs, conversations, *sizes, corrected), json, processes, fresh)


def earlier_command(
    json: Json,
    model: Model = REFERENCE,
    cases: Annotated[
        int, typer.Option("--limit", min=1, help="Cases: generated ones, or files of --data.")
    ] = 4,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="What the new session has of the earlier ones: rows, rows-of-passages, one-session, "
            "newest-text, passages, passages-nearest-last, summaries, nothing; repeatable. Default: all."
        ),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Earlier sessions of a generated case.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each of these, in tokens.")] = 4000,
    questions: Annotated[
        int, typer.Option(min=1, help="Questions of a case; at most 42 of a generated one.")
    ] = 42,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            exists=True,
            help="LoCoMo file or folder, whose files are cases; repeatable: one case of all.",
        ),
    ] = None,
    chunks: Chunks = None,
    budget: Budget = "256",
    block: Block = 256,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Answers in a new session about earlier ones, by what it has of them: rows, text or nothing."""
    from evals.configs import parse_config
    from evals.suites.earlier import suite as earlier
    from evals.suites.earlier.arms import ARMS

    chosen = [each.replace("-", " ") for each in arms or ARMS]
    if unknown := [each for each in chosen if each not in ARMS]:
        expected = ", ".join(each.replace(" ", "-") for each in ARMS)
        raise typer.BadParameter(f"unknown arm {unknown[0]!r}; expected one of {expected}")
    setup = replace(
        build_setup(model, budget, seed, block, "4"), config=parse_config(earlier.CONFIG)
    )
    first = earlier.Earlier(setup, "", 0, sessions, tokens, questions)
    absolute = [each.absolute() for each in sources or ()]
    run_suite(earlier.suite(first, chosen, chunks or [0], cases, absolute), json, processes, fresh)


def fidelity_command(
    json: Json,
    model: Model = REFERENCE,
    data: Data = None,
    limit: Limit = 2,
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


def methods_command(
    json: Json,
    model: Model = REFERENCE,
    data: Data = None,
    limit: Limit = 12,
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
