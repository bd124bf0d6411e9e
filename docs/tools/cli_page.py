"""The page of the command line: every command with its arguments and options."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer
from tables import describe_type, to_table
from typer.models import ArgumentInfo, OptionInfo

INTRODUCTION = """# Command line

`kvrecall COMMAND --help` shows the same text. Every setting of `serve`, `worker` and `gateway` can
also come from the environment: see [Settings](settings.md).
"""


def build() -> str:
    """The page's text."""
    sections = [describe_command(*each) for each in commands(load_app(), "kvrecall")]
    return "\n".join([INTRODUCTION, *sections])


def load_app() -> typer.Typer:
    """The Typer application, of the package or of its module of commands."""
    package = import_module("kvrecall_server.cli")
    app = getattr(package, "app", None) or import_module("kvrecall_server.cli.commands").app
    assert isinstance(app, typer.Typer)
    return app


def commands(app: typer.Typer, prefix: str) -> Iterator[tuple[str, Any]]:
    """Full names and functions of all commands, in the order of `--help`."""
    for command in app.registered_commands:
        yield f"{prefix} {command.name}", command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{prefix} {group.name}")


def describe_command(name: str, callback: Any) -> str:
    """A section: usage, help text, a table of arguments and options."""
    arguments = []
    rows = []
    for parameter in inspect.signature(callback, eval_str=True).parameters.values():
        annotation, info = split_annotation(parameter.annotation)
        if info.hidden:
            continue
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or parameter.name.upper()
            arguments.append(shown if required else f"[{shown}]")
        else:
            shown = ", ".join(option_names(info, parameter.name))
        kind = "" if annotation is bool else describe_type(annotation)
        rows.append([f"`{shown}`", kind, describe_default(default, required), info.help or ""])
    usage = " ".join([name, *arguments, "[OPTIONS]"])
    text = inspect.cleandoc(callback.__doc__ or "").replace("\b\n", "")
    table = to_table(["option", "value", "default", ""], rows)
    return f"## {name}\n\n```text\n{usage}\n```\n\n{text}\n\n{table}"


def split_annotation(annotation: Any) -> tuple[Any, ArgumentInfo | OptionInfo]:
    """The type of a parameter and Typer's description of it."""
    if get_origin(annotation) is not Annotated:
        return annotation, OptionInfo()
    kind, *metadata = get_args(annotation)
    described = [each for each in metadata if isinstance(each, ArgumentInfo | OptionInfo)]
    return kind, described[-1] if described else OptionInfo()


def option_names(info: OptionInfo, parameter: str) -> list[str]:
    """The names of an option as they are typed."""
    declared = [name for name in info.param_decls or () if name.startswith("-")]
    return declared or [f"--{parameter.replace('_', '-')}"]


def describe_default(value: Any, required: bool) -> str:
    """A default as it is typed; empty where the help text names it or there is none."""
    if required:
        return "required"
    return "" if value is None or value is False or value == "" else f"`{value}`"
