"""Command-line options that several commands share, and settings built from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.app.settings import LogFormat, Quantization, Settings

Model = Annotated[
    str | None,
    typer.Option(
        help="Causal LM: hub name, folder, GGUF file, smollm2 or reference. Default: reference, the "
        "packaged test instrument."
    ),
]
Data = Annotated[Path | None, typer.Option(help="Data directory. Default: ./kvrecall-data.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Weights: float32, bfloat16 or float16. Default: the checkpoint's own; "
        "float32 instead of bfloat16 on a CPU without instructions for it."
    ),
]
Quantize = Annotated[
    Quantization | None,
    typer.Option(
        help="Decode on a CPU with weights of 8 or 4 bits, in bfloat16. Rows are another model's: "
        "sessions that were stored without it are refused."
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Resident sessions: those whose active rows are in memory at once."),
]
MaxBudget = Annotated[
    int | None,
    typer.Option("--budget", min=1, help="Largest budget that a session may ask for, in rows."),
]
Block = Annotated[int | None, typer.Option(min=1, help="Tokens prefilled in one step.")]
Ram = Annotated[
    int | None, typer.Option(min=1, help="Size of the RAM tier above the files, in MiB.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one. Default: 8420."),
]
Grpc = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of the gRPC API; port 0: any free one. Default: no gRPC."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="One key, with all rights, that clients must send. Other users of this machine can see "
        "it among the processes: KVRECALL_API_KEY hides it. Default: those of `kvrecall keys`."
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="Certificate chain of this process, PEM. Default: no TLS.")
]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")]
Log = Annotated[LogFormat | None, typer.Option(help="Log format on standard error.")]
# For a process that another command starts: it ends with the command, even when that is killed.
UntilInputEnds = Annotated[bool, typer.Option("--until-input-ends", hidden=True)]

Url = Annotated[str | None, typer.Option(help="Address of a running server. Default: start one.")]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", help="Model of the server that is started, as for `kvrecall serve`."),
]
Budget = Annotated[int, typer.Option(min=1, help="Budget of the session, in active rows.")]
RepairRows = Annotated[
    int, typer.Option(min=0, help="Rows of the budget reserved for repair (promoted rows).")
]
Method = Annotated[str, typer.Option(help="Eviction method; `kvrecall methods` lists them.")]


def build_settings(**options: Any) -> Settings:
    """Build the settings from a command's options, which have the settings' names.

    Mappings are nested settings. An option that is None is left to the environment and the
    defaults. Raises pydantic's ValidationError for a value that a setting does not accept.
    """
    return Settings(**_drop_unset(options))


def mebibytes(count: int | None) -> int | None:
    """Bytes of a number of MiB; None stays None."""
    return None if count is None else count << 20


def _drop_unset(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _drop_unset(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value is not None
    }
