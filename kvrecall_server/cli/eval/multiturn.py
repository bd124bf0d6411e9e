"""`kvrecall eval multiturn`: questions before, within and behind their context."""

from typing import Annotated

import typer

from kvrecall_server.app.models import REFERENCE, is_reference
from kvrecall_server.cli.eval.options import (
    Block,
    Budgets,
    Data,
    Fresh,
    Json,
    Model,
    Processes,
    Seed,
)
from kvrecall_server.cli.eval.run import absolute_paths, build_setup, run_suite, split_words

SEED = 9200

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Arms by name, or run configurations without episodes; several: separated by spaces, or "
        "repeat the option. Default: all arms."
    ),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        help="qa, list, fewshot; with --data one of locomo, airline, longbench. Default: the first "
        "three."
    ),
]
Places = Annotated[
    list[str] | None, typer.Option(help="Places of the question: begin, middle, end. Default: all.")
]


def multiturn_command(
    json: Json,
    model: Model = REFERENCE,
    dialogues: Annotated[
        int, typer.Option("--limit", min=1, help="Number of dialogues of each kind.")
    ] = 24,
    kinds: Kinds = None,
    places: Places = None,
    turns: Annotated[int, typer.Option(min=1, max=6, help="Turns of a dialogue.")] = 3,
    distractors: Annotated[
        int, typer.Option(min=0, help="Facts of each of two pools of other people, in a turn.")
    ] = 1,
    chat: Annotated[int, typer.Option(min=0, help="Sentences of small talk with each fact.")] = 1,
    statements: Annotated[int, typer.Option(min=1, help="How often a fact is stated.")] = 1,
    tokens: Annotated[
        int, typer.Option(min=200, help="Tokens of a dialogue of recorded text, about.")
    ] = 1500,
    answers: Annotated[
        str,
        typer.Option(
            help="generated, or chosen among the values stated, behind the beginning of the reply. "
            "Default: generated with the reference model, else chosen."
        ),
    ] = "",
    methods: Methods = None,
    budgets: Budgets = None,
    data: Data = None,
    block: Block = 64,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Questions before, within and behind the context of several turns (LoopServe's benchmark)."""
    from evals.suites.multiturn import suite as multiturn
    from evals.suites.multiturn.arms import choose_arms
    from evals.suites.multiturn.dialogue import Size
    from evals.suites.multiturn.kinds import check_kinds

    sources = absolute_paths(data)
    chosen = check_kinds(split_words(kinds), sources)
    first = multiturn.Unit(
        setup=build_setup(model, "", seed, block, "4"),
        kind=chosen[0],
        place="end",
        size=Size(turns, distractors, chat, statements, tokens),
        answers=multiturn.parse_answers(answers, is_reference(model)),
        arms=choose_arms(split_words(methods)),
        budgets=tuple(split_words(budgets) or multiturn.BUDGETS),
        data=sources,
    )
    asked = multiturn.parse_places(split_words(places))
    run_suite(multiturn.suite(first, chosen, asked, dialogues), json, processes, fresh)
