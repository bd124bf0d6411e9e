"""The `kvrecall` application itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvrecall import __version__


def test_the_version_is_printed(command: Callable[..., Any]) -> None:
    found = command("--version")
    assert (found.exit_code, found.output) == (0, f"kvrecall {__version__}\n")


def test_an_output_that_nobody_reads_any_more_is_no_fault() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvrecall_server.cli", "config"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
