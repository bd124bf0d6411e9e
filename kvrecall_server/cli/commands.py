"""The `kvrecall` application: all commands, and one line on standard error for expected errors."""

import os
import sys
from typing import Annotated, Any

import structlog
import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from kvrecall import __version__
from kvrecall.client import KvrecallError
from kvrecall_server.app.errors import CliError
from kvrecall_server.app.logs import format_error, logs_json, set_up_logs
from kvrecall_server.app.start.environment import describe_invalid, describe_unparsable
from kvrecall_server.cli.access.encryption import encryption_app
from kvrecall_server.cli.access.keys import keys_app
from kvrecall_server.cli.archive import export_command, import_command
from kvrecall_server.cli.chat.command import chat_command
from kvrecall_server.cli.demo import demo_command
from kvrecall_server.cli.eval.app import eval_app
from kvrecall_server.cli.fsck import fsck_command
from kvrecall_server.cli.gateway import gateway_command
from kvrecall_server.cli.health import health_command
from kvrecall_server.cli.machine.config import config_command
from kvrecall_server.cli.machine.doctor import doctor_command
from kvrecall_server.cli.machine.models import models_app
from kvrecall_server.cli.machine.size import size_command
from kvrecall_server.cli.methods import methods_command
from kvrecall_server.cli.profile_layers import profile_layers_command
from kvrecall_server.cli.replay import replay_command
from kvrecall_server.cli.report import report_command
from kvrecall_server.cli.serve import serve_command
from kvrecall_server.cli.sessions import sessions_command
from kvrecall_server.cli.worker import worker_command

_LOG_LEVEL = "KVRECALL_LOG_LEVEL"


class _Command(TyperCommand):
    """Command whose help names no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_types(super().get_params(ctx))


class _Commands(TyperGroup):
    """Command group whose expected errors end in one line and an exit code, not a traceback."""

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        set_up_logs("console")  # commands that serve do it again, by their settings
        try:
            return super().invoke(ctx)
        except CliError as error:
            _print_error(str(error))
            raise typer.Exit(error.exit_code) from error
        except KvrecallError as error:
            _print_error(_describe_answer(error))
            raise typer.Exit(2) from error
        except ValidationError as error:
            _print_error(describe_invalid(error, os.environ))
            raise typer.Exit(2) from error
        except SettingsError as error:
            _print_error(describe_unparsable(error, os.environ))
            raise typer.Exit(2) from error
        except Exception as error:
            if isinstance(error, typer.Abort | BrokenPipeError) or hasattr(error, "exit_code"):
                raise  # of typer: an end with an exit code, wrong usage, or an output without a reader
            if not logs_json():
                _print_fault(error)
                raise typer.Exit(1) from error
            structlog.get_logger("kvrecall.process").critical("uncaught error", exc_info=error)
            raise typer.Exit(1) from error


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    """Keep `<bool>` out of the help of flags, which take no value."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


def _describe_answer(error: KvrecallError) -> str:
    if error.status:
        return f"the service answered: {error}"
    return f"no service answers: {error}; start one with `kvrecall serve`, or name it with --url"


def _print_error(message: str) -> None:
    if logs_json():
        structlog.get_logger("kvrecall.process").error("command failed", reason=message)
        return
    Console(file=sys.stderr).print(
        f"kvrecall: {message}", style="red", soft_wrap=True, highlight=False, markup=False
    )


def _print_fault(error: Exception) -> None:
    """Print an error that no command expects: in one line, or with log level debug whole."""
    if os.environ.get(_LOG_LEVEL, "").lower() == "debug":
        Console(stderr=True).print(format_error(sys.exc_info()), markup=False, highlight=False)
    first = next(iter(str(error).splitlines()), "no message")
    _print_error(
        f"unexpected error, a fault of kvrecall: {type(error).__name__}: {first}; "
        f"{_LOG_LEVEL}=debug shows where; please report it"
    )


app = typer.Typer(
    cls=_Commands,
    help="Conversational memory for self-hosted LLMs: a KV cache under a fixed budget. "
    "Evicted rows stay in storage and are promoted when they are needed.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvrecall {__version__}")
        raise typer.Exit


def version_command() -> None:
    """Print the version."""
    _print_version(True)


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


app.command("serve", cls=_Command)(serve_command)
app.command("worker", cls=_Command)(worker_command)
app.command("gateway", cls=_Command)(gateway_command)
app.command("health", cls=_Command)(health_command)
app.command("fsck", cls=_Command)(fsck_command)
app.command("export", cls=_Command)(export_command)
app.command("import", cls=_Command)(import_command)
app.command("chat", cls=_Command)(chat_command)
app.command("demo", cls=_Command)(demo_command)
app.command("replay", cls=_Command)(replay_command)
app.command("report", cls=_Command)(report_command)
app.command("sessions", cls=_Command)(sessions_command)
app.command("doctor", cls=_Command)(doctor_command)
app.command("config", cls=_Command)(config_command)
app.command("size", cls=_Command)(size_command)
app.command("version", cls=_Command)(version_command)
app.command("methods", cls=_Command)(methods_command)
app.command("profile-layers", cls=_Command)(profile_layers_command)
app.add_typer(eval_app, name="eval")
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")
app.add_typer(encryption_app, name="encryption")
