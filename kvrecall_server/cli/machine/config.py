"""`kvrecall config`: every setting, its value, and what has set it."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import SecretStr
from rich.console import Console
from rich.text import Text

from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.environment import iter_fields, to_variable
from kvrecall_server.cli.options import (
    ApiKey,
    Block,
    Data,
    Dtype,
    Grpc,
    Host,
    Json,
    Log,
    MaxBudget,
    Model,
    Port,
    Quantize,
    Ram,
    Slots,
    build_settings,
    mebibytes,
)

DEFAULT = "default"
ENVIRONMENT = "environment"
FLAG = "flag"
HIDDEN = "(hidden)"


@dataclass(frozen=True)
class SettingValue:
    """A setting: its variable, its value as JSON has it, and what has set it."""

    variable: str
    value: Any
    set_by: str


def config_command(
    model: Model = None,
    data: Data = None,
    slots: Slots = None,
    budget: MaxBudget = None,
    block: Block = None,
    ram: Ram = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    host: Host = None,
    port: Port = None,
    grpc: Grpc = None,
    api_key: ApiKey = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Show every setting and what has set it: a default, the environment or a flag.

    Flags are those of `kvrecall serve`: what it would run with. Secrets are not shown.
    """
    options = {
        "model": model,
        "data": data,
        "dtype": dtype,
        "quantize": quantize,
        "ram_bytes": mebibytes(ram),
        "host": host,
        "port": port,
        "grpc": {"listen": grpc},
        "api_key": api_key,
        "log": log,
        "worker": {"slots": slots, "max_budget": budget, "block_tokens": block},
    }
    found = list(explain(build_settings(**options), options, os.environ))
    if as_json:
        _print_json(found)
        return
    console = Console()
    for each in found:
        value = "" if each.value is None else f"{each.value}"
        line = Text(f"{each.variable}={value}  # {each.set_by}")
        line.stylize("dim" if each.set_by == DEFAULT else "bold")
        console.print(line, soft_wrap=True)


def explain(
    settings: Settings, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[SettingValue]:
    """Say of each setting what has set it: an option that is not None, the environment, or nothing."""
    names = {name.upper() for name in environment}
    for path, _ in iter_fields():
        value = _get_value(settings, path)
        origin = ENVIRONMENT if _is_named(path, names) else DEFAULT
        yield SettingValue(to_variable(path), value, FLAG if _is_given(options, path) else origin)


def _get_value(settings: Settings, path: tuple[str, ...]) -> Any:
    value: Any = settings
    for name in path:
        value = getattr(value, name)
    if isinstance(value, SecretStr):
        return HIDDEN
    return value if value is None or isinstance(value, bool | int | float) else _to_text(value)


def _to_text(value: Any) -> str:
    return json.dumps([str(each) for each in value]) if isinstance(value, tuple) else str(value)


def _is_named(path: tuple[str, ...], names: set[str]) -> bool:
    """Whether the environment has a setting, or the group that it is of, as JSON."""
    return any(to_variable(path[:count]) in names for count in range(1, len(path) + 1))


def _is_given(options: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    value: Any = options
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value is not None


def _print_json(found: list[SettingValue]) -> None:
    print(json.dumps([asdict(each) for each in found], indent=1))
