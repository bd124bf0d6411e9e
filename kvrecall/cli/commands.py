"""The `kvrecall` application: all commands, and one line on standard error for expected errors."""

import sys
from typing import Annotated, Any

import structlog
import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperGroup

from kvrecall import __version__
from kvrecall.app.errors import CliError
from kvrecall.app.logs import logs_json
from kvrecall.cli.archive import export_command, import_command
from kvrecall.cli.chat.command import chat_command
from kvrecall.cli.demo import demo_command
from kvrecall.cli.eval.app import eval_app
from kvrecall.cli.fsck import fsck_command
from kvrecall.cli.gateway import gateway_command
from kvrecall.cli.health import health_command
from kvrecall.cli.keys import keys_app
from kvrecall.cli.methods import methods_command
from kvrecall.cli.profile_layers import profile_layers_command
from kvrecall.cli.replay import replay_command
from kvrecall.cli.report import report_command
from kvrecall.cli.serve import serve_command
from kvrecall.cli.upgrade import upgrade_command
from kvrecall.cli.worker import worker_command
from kvrecall.client import KvrecallError


class _Commands(TyperGroup):
    """Command group whose expected errors end in one line and an exit code, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            _print_error(str(error))
            raise typer.Exit(error.exit_code) from error
        except KvrecallError as error:
            _print_error(f"the service answered: {error}")
            raise typer.Exit(2) from error
        except ValidationError as error:
            first = error.errors()[0]
            _print_error(f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}")
            raise typer.Exit(2) from error
        except Exception as error:
            if not logs_json():
                raise  # shown by typer
            structlog.get_logger("kvrecall.process").critical("uncaught error", exc_info=error)
            raise typer.Exit(1) from error


def _print_error(message: str) -> None:
    if logs_json():
        structlog.get_logger("kvrecall.process").error("command failed", reason=message)
        return
    Console(file=sys.stderr).print(
        f"kvrecall: {message}", style="red", soft_wrap=True, highlight=False, markup=False
    )


app = typer.Typer(
    cls=_Commands,
    help="Conversational memory for self-hosted LLMs: a KV cache under a fixed budget. "
    "Evicted rows stay in storage and are promoted when they are needed.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvrecall {__version__}")
        raise typer.Exit


@app.callback()
def _kvrecall(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("serve")(serve_command)
app.command("worker")(worker_command)
app.command("gateway")(gateway_command)
app.command("health")(health_command)
app.command("fsck")(fsck_command)
app.command("export")(export_command)
app.command("import")(import_command)
app.command("upgrade")(upgrade_command)
app.command("chat")(chat_command)
app.command("demo")(demo_command)
app.command("replay")(replay_command)
app.command("report")(report_command)
app.command("methods")(methods_command)
app.command("profile-layers")(profile_layers_command)
app.add_typer(eval_app, name="eval")
app.add_typer(keys_app, name="keys")
