"""`kvrecall eval sampling`: answers under candidates for a model's sampling defaults."""

from typing import Annotated, Literal

import typer

from kvrecall_server.app.models import SMOLLM2
from kvrecall_server.cli.eval.options import SEED, Block, Fresh, Json, Model, Processes, Seed
from kvrecall_server.cli.eval.run import build_setup, run_suite


def sampling_command(
    json: Json,
    model: Model = SMOLLM2,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--sampling",
            help='Candidate: a JSON object, say {"temperature": 0.7}; repeatable. Default: greedy.',
        ),
    ] = None,
    split: Annotated[
        Literal["tuning", "held-out"],
        typer.Option(help="Prompts: candidates are chosen on tuning, and reported on held-out."),
    ] = "tuning",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per candidate.")] = 1,
    block: Block = 128,
    seed: Seed = SEED,
    processes: Processes = 2,
    fresh: Fresh = False,
) -> None:
    """Simple facts answered right, and answers that loop, by temperature, penalties and the like."""
    from evals.suites.sampling.suite import suite

    setup = build_setup(model, "1/1", seed, block, "4")
    run_suite(suite(setup, candidates or ["{}"], seeds, split), json, processes, fresh)
