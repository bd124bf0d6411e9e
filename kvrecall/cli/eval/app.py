"""`kvrecall eval`: quality suites."""

import typer

from kvrecall.cli.eval.multiturn import multiturn_command
from kvrecall.cli.eval.quality import (
    fidelity_command,
    locomo_command,
    longconv_command,
    methods_command,
    passkey_command,
)
from kvrecall.cli.eval.repair import mq_niah_command, planted_command, repository_command
from kvrecall.cli.eval.sampling import sampling_command

eval_app = typer.Typer(
    help="Quality suites: answer accuracy and fidelity by method and budget.", no_args_is_help=True
)
eval_app.command("longconv")(longconv_command)
eval_app.command("passkey")(passkey_command)
eval_app.command("fidelity")(fidelity_command)
eval_app.command("methods")(methods_command)
eval_app.command("locomo")(locomo_command)
eval_app.command("mq-niah")(mq_niah_command)
eval_app.command("repository")(repository_command)
eval_app.command("planted")(planted_command)
eval_app.command("multiturn")(multiturn_command)
eval_app.command("sampling")(sampling_command)
