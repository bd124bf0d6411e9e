"""`kvrecall models`: the models of this machine, and removal of converted ones."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvrecall_server.app.errors import CliError
from kvrecall_server.app.hub import list_cached
from kvrecall_server.app.models import (
    REFERENCE,
    SMOLLM2,
    SMOLLM2_INSTALL,
    conversions_directory,
    find_gguf,
    is_smollm2_installed,
)
from kvrecall_server.cli.options import Json
from kvrecall_server.cli.tables import print_table
from kvrecall_server.reporting.units import readable_bytes
from reference import MODEL_PATH
from workers.model.weights.gguf_file import CONVERSIONS, read_source

models_app = typer.Typer(
    help="List the models of this machine; remove what GGUF files were converted to.",
    no_args_is_help=True,
)

PACKAGED = "packaged"
CONVERTED = "converted"
CACHED = "hub cache"


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine: what `--model` takes, or of a conversion the name to remove it by."""

    name: str
    kind: str
    bytes: int
    path: str
    of: str = ""


class UnknownModel(CliError):
    """No conversion has that name."""


@models_app.command("list")
def list_command(as_json: Json = False) -> None:
    """List packaged models, conversions of GGUF files, and what the hub's cache has."""
    found = [*iter_packaged(), *iter_conversions(), *iter_cached()]
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return
    rows = [
        [each.name, each.kind, readable_bytes(each.bytes), each.of or each.path] for each in found
    ]
    print_table(("name", "kind", "size", "from"), rows)
    if not is_smollm2_installed():
        print(f"{SMOLLM2} is not installed: {SMOLLM2_INSTALL}")


@models_app.command("remove")
def remove_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of conversions, as `list` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all conversions.")] = False,
) -> None:
    """Remove conversions of GGUF files. A file is converted again at its next use."""
    known = {each.name: each for each in iter_conversions()}
    chosen = list(known) if everything else list(names or ())
    unknown = [name for name in chosen if name not in known]
    if unknown or not (chosen or everything):
        subject = (
            f"no conversion is called {unknown[0]}" if unknown else "name a conversion, or --all"
        )
        raise UnknownModel(f"{subject}; there are: {', '.join(known) or 'none'}")
    for name in chosen:
        shutil.rmtree(known[name].path)
    freed = sum(known[name].bytes for name in chosen)
    print(f"{len(chosen)} removed, {readable_bytes(freed)} freed")


def iter_packaged() -> Iterator[LocalModel]:
    """The models that come with packages."""
    yield LocalModel(
        REFERENCE, PACKAGED, _get_size(MODEL_PATH), str(MODEL_PATH), "a test instrument"
    )
    if is_smollm2_installed() and (file := find_gguf(SMOLLM2)):
        yield LocalModel(SMOLLM2, PACKAGED, file.stat().st_size, str(file))


def iter_conversions() -> Iterator[LocalModel]:
    """The folders that GGUF files were converted to, and drafts that were never finished."""
    for folder in sorted(conversions_directory().glob(CONVERSIONS)):
        if folder.is_dir():
            source = read_source(folder) or "a file that is not recorded"
            yield LocalModel(folder.name, CONVERTED, _get_size(folder), str(folder), source)


def iter_cached() -> Iterator[LocalModel]:
    """The models in the cache of Hugging Face's hub."""
    yield from (LocalModel(name, CACHED, size, path) for name, size, path in list_cached())


def _get_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
