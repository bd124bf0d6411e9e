"""Command-line options that several commands share, and settings built from them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from kvrecall_server.app.settings import DeviceMap, LogFormat, Quantization, Settings
from kvrecall_server.app.start.environment import (
    DELIMITER,
    PREFIX,
    URL_VARIABLE,
    check_environment,
    iter_fields,
)


def setting(
    name: str, help: str, *declared: str, default: str | None = None, **bounds: Any
) -> OptionInfo:
    """Build the option of a setting: its help ends with the default and the environment's variable.

    `name` is the variable's without prefix, in lower case (`worker__slots`); `default` replaces the
    setting's own, and an empty one is left out: the help says it.
    """
    field = dict(iter_fields())[tuple(name.split(DELIMITER))]
    if default is None and field.default is not None:
        default = str(field.default)
    shown = f" Default: {default}." if default else ""
    option: OptionInfo = typer.Option(
        *declared, help=f"{help}{shown} [{PREFIX}{name.upper()}]", **bounds
    )
    return option


Model = Annotated[
    str | None,
    setting(
        "model", "Causal LM: hub name, folder, GGUF file, smollm2 or reference, a test instrument."
    ),
]
Data = Annotated[Path | None, setting("data", "Data directory.", default="./kvrecall-data")]
Dtype = Annotated[
    str | None,
    setting(
        "dtype",
        "Weights: float32, bfloat16 or float16. Default: the checkpoint's own; "
        "float32 instead of bfloat16 on a CPU without instructions for it.",
    ),
]
Quantize = Annotated[
    Quantization | None,
    setting(
        "quantize",
        "Decode on a CPU with weights of 8 or 4 bits, in bfloat16. Rows are another model's: "
        "sessions that were stored without it are refused. Default: none.",
    ),
]
DeviceMapOption = Annotated[
    DeviceMap | None,
    setting(
        "device_map",
        "`auto` divides the model's layers between all GPUs of the machine, for a model that one of "
        "them has no room for. Default: one GPU.",
    ),
]
TensorParallel = Annotated[
    int | None,
    setting(
        "tensor_parallel",
        "Processes, each on a device of its own, that the model's heads are divided between.",
    ),
]
Slots = Annotated[
    int | None,
    setting(
        "worker__slots",
        "Resident sessions: those whose active rows are in memory at once.",
        min=1,
    ),
]
MaxBudget = Annotated[
    int | None,
    setting(
        "worker__max_budget",
        "Most rows that a session keeps active, per KV head: all of its rows up to so many, an "
        "eighth of a longer session's.",
        "--budget",
        min=1,
    ),
]
Block = Annotated[
    int | None, setting("worker__block_tokens", "Tokens prefilled in one step.", min=1)
]
Ram = Annotated[
    int | None,
    setting(
        "ram_bytes",
        "Host memory for stored rows, in MiB; the variable has bytes. Default: a third of the "
        "memory, at most what is free.",
        min=1,
    ),
]
Host = Annotated[str | None, setting("host", "Address to listen on.")]
Port = Annotated[
    int | None, setting("port", "Port to listen on; 0: any free one.", min=0, max=65535)
]
Grpc = Annotated[
    str | None,
    setting("grpc__listen", "HOST:PORT of the gRPC API; port 0: any free one. Default: no gRPC."),
]
ApiKey = Annotated[
    str | None,
    setting(
        "api_key",
        "One key, with all rights, that clients must send. Other users of this machine can see it "
        "among the processes: the variable hides it. Default: those of `kvrecall keys`.",
    ),
]
Log = Annotated[LogFormat | None, setting("log", "Log format on standard error.")]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of a running server. Default: http://127.0.0.1:8420, or what KVRECALL_HOST and "
        "KVRECALL_PORT say. [KVRECALL_URL]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
# For a process that another command starts: it ends with the command, even when that is killed.
UntilInputEnds = Annotated[bool, typer.Option("--until-input-ends", hidden=True)]

Url = Annotated[str | None, typer.Option(help="Address of a running server. Default: start one.")]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", help="Model of the server that is started, as for `kvrecall serve`."),
]
Budget = Annotated[int, typer.Option(min=1, help="Budget of the session, in active rows.")]
# Budget of sessions that commands measure, small enough that a short conversation exceeds it.
MEASURED_BUDGET = 256
RepairRows = Annotated[
    int, typer.Option(min=0, help="Rows of the budget reserved for repair (promoted rows).")
]
Method = Annotated[str, typer.Option(help="Eviction method; `kvrecall methods` lists them.")]


def build_settings(**options: Any) -> Settings:
    """Build the settings from a command's options, which have the settings' names.

    Mappings are nested settings. An option that is None is left to the environment and the
    defaults. Raises pydantic's ValidationError for a value that a setting does not accept, and
    UnknownVariable for a variable of the environment that is none.
    """
    check_environment(os.environ)
    return Settings(**_drop_unset(options))


def get_server_url(url: str | None) -> str:
    """The address of a running server: as given, by KVRECALL_URL, or where one listens by default."""
    if found := url or os.environ.get(URL_VARIABLE):
        return found
    settings = build_settings()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def mebibytes(count: int | None) -> int | None:
    """Bytes of a number of MiB; None stays None."""
    return None if count is None else count << 20


def _drop_unset(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _drop_unset(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value is not None
    }
