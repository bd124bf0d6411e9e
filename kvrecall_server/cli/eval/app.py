"""`kvrecall eval`: quality suites."""

from collections.abc import Callable
from functools import wraps

import typer
from rich.console import Console

from kvrecall_server.cli.eval.multiturn import multiturn_command
from kvrecall_server.cli.eval.quality import (
    ages_command,
    earlier_command,
    fidelity_command,
    locomo_command,
    longconv_command,
    methods_command,
    passkey_command,
)
from kvrecall_server.cli.eval.repair import mq_niah_command, planted_command, repository_command
from kvrecall_server.cli.eval.sampling import sampling_command

eval_app = typer.Typer(
    help="Quality suites: answer accuracy and fidelity by method and budget.", no_args_is_help=True
)


def _add(name: str, command: Callable[..., None]) -> None:
    """Add a suite's command, which says at once that it runs: its imports take seconds."""

    @wraps(command)
    def run(*arguments: object, **options: object) -> None:
        Console(stderr=True).print(f"{name}: starting", style="dim", highlight=False)
        command(*arguments, **options)

    eval_app.command(name)(run)


_add("longconv", longconv_command)
_add("passkey", passkey_command)
_add("ages", ages_command)
_add("earlier", earlier_command)
_add("fidelity", fidelity_command)
_add("methods", methods_command)
_add("locomo", locomo_command)
_add("mq-niah", mq_niah_command)
_add("repository", repository_command)
_add("planted", planted_command)
_add("multiturn", multiturn_command)
_add("sampling", sampling_command)
