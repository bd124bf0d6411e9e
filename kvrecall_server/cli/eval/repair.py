"""`kvrecall eval` for repair: what it brings back, by condition and K."""

from pathlib import Path
from typing import Annotated

import typer

from kvrecall_server.app.models import REFERENCE
from kvrecall_server.cli.eval.options import (
    SEED,
    Block,
    Codecs,
    Conditions,
    Data,
    Fresh,
    Json,
    Ks,
    Model,
    Processes,
    Seed,
)
from kvrecall_server.cli.eval.run import absolute_paths, resolve_reference, run_suite, split_words

# Each command imports its suite itself: torch takes seconds to import, which --help does without.

MQ_NIAH_SEED = 9100


Facts = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        max=8,
        help="Facts asked for at once; repeatable: a text holds the most. Default: 1.",
    ),
]
ResultTokens = Annotated[
    list[int] | None,
    typer.Option(
        "--result",
        min=50,
        help="Tokens of a tool's result with a question in it, as the signal; repeatable.",
    ),
]
ResultData = Annotated[
    list[Path] | None,
    typer.Option(
        help="Recordings that these results are taken from: a file or a folder; repeatable. "
        "Default: generated."
    ),
]


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
    ks: Ks = None,
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


def planted_command(
    json: Json,
    model: Annotated[str, typer.Option(help="Causal LM that reads English, by path or hub name.")],
    data: Annotated[str, typer.Option(help="LoCoMo folder; generated small talk without it.")] = "",
    split: Annotated[
        str, typer.Option(help="tuning (defaults were chosen on it) or held_out.")
    ] = "held_out",
    cases: Annotated[int, typer.Option("--limit", min=1, help="Number of texts.")] = 48,
    facts: Facts = None,
    results: ResultTokens = None,
    result_data: ResultData = None,
    conditions: Conditions = None,
    ks: Ks = None,
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
