"""The `kvrecall` application itself."""

from collections.abc import Callable
from typing import Any

from kvrecall import __version__


def test_the_version_is_printed(command: Callable[..., Any]) -> None:
    found = command("--version")
    assert (found.exit_code, found.output) == (0, f"kvrecall {__version__}\n")
