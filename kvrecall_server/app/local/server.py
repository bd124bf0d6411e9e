"""A server process for a command that has none: on a free port, ended with the command."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from kvrecall.client import KvrecallClient
from kvrecall_server.app.errors import CannotServe, ServerNotReady
from kvrecall_server.app.models import check_model, find_gguf, resolve_model
from kvrecall_server.app.progress import show_progress
from kvrecall_server.app.run import LISTENING
from kvrecall_server.app.settings import Settings
from workers.errors import ModelRefused

START_SECONDS = 900.0
STOP_SECONDS = 45.0
# -P: a folder `services/` of the application that starts it hides none of ours.
PROGRAM = ("-P", "-m", "kvrecall_server.cli")


class Serving(Protocol):
    """A process whose output has a line with its address: `subprocess.Popen`, or one like it."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Its output."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""


@dataclass(frozen=True)
class ServerNeeds:
    """Requirements on a started server; None leaves a value to the settings."""

    model: str | None = None
    slots: int | None = None
    max_budget: int | None = None
    block_tokens: int | None = None
    data: Path | None = None
    grpc: str | None = None

    def arguments(self) -> list[str]:
        """Command-line options for `kvrecall serve`."""
        options = {
            "--model": self.model,
            "--slots": self.slots,
            "--budget": self.max_budget,
            "--block": self.block_tokens,
            "--data": self.data,
            "--grpc": self.grpc,
        }
        return [
            text
            for name, value in options.items()
            if value is not None
            for text in (name, str(value))
        ]


@contextmanager
def server_at(url: str | None, needs: ServerNeeds) -> Iterator[str]:
    """The address of a ready server: the one at `url`, or one that runs as long as the context.

    Without `needs.data` the started server has a temporary data directory.
    Raises ServerNotReady, and CannotServe for a model that cannot be found.
    """
    if url is not None:
        with KvrecallClient(url) as client:
            if not client.ready():
                raise ServerNotReady(
                    f"no kvrecall service is ready at {url}; start one with: kvrecall serve"
                )
        yield url
        return
    _prepare_model(needs.model)
    with tempfile.TemporaryDirectory(prefix="kvrecall-") as folder:
        data = needs.data or Path(folder) / "data"
        arguments = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--data",
            str(data),
            "--log",
            "json",
            *needs.arguments(),
        ]
        with _started(arguments, Path(folder) / "server.log") as started:
            yield started


def _prepare_model(name: str | None) -> None:
    """Convert a GGUF file here, where its progress is seen. Raises CannotServe."""
    try:
        chosen = name or Settings().model
        check_model(chosen)
        if find_gguf(chosen) is not None:
            with show_progress(f"preparing {chosen}"):
                resolve_model(chosen)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error


@contextmanager
def _started(arguments: Sequence[str], log: Path) -> Iterator[str]:
    with show_progress("starting a server"):
        process, address = launch(arguments, log)
    with process:
        try:
            yield address
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def launch(
    arguments: Sequence[str],
    log: Path,
    command: str = "serve",
    *,
    program: Sequence[str] = PROGRAM,
    environment: Mapping[str, str] | None = None,
) -> tuple["subprocess.Popen[bytes]", str]:
    """Start `kvrecall serve`, or another serving command, and wait until it listens.

    Returns the process, which the caller must end, and its address. `program` are the interpreter's
    arguments before the command; `environment` replaces this process's. The log is appended to
    the file `log`. Raises ServerNotReady.
    """
    started = [sys.executable, *program, command, "--until-input-ends", *arguments]
    pipe = subprocess.PIPE
    with log.open("ab") as errors:
        # A process session of its own keeps Ctrl-C from it; its input ends with this process.
        process = subprocess.Popen(
            started, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, env=environment
        )
    return process, wait_for_address(process, log)


def wait_for_address(process: Serving, log: Path) -> str:
    """Read a server's output up to the line with its address.

    A process that does not listen within `START_SECONDS` is killed. Raises ServerNotReady.
    """
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None, "the process was started with a pipe"
        for line in process.stdout:
            text = line.decode().strip()
            if text.startswith(LISTENING):
                return text.removeprefix(LISTENING)
        raise ServerNotReady(f"the server did not start: {_last_line(log)}")
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()


def _last_line(log: Path) -> str:
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return _get_reason(lines[-1]) if lines else "its log is empty"


def _get_reason(line: str) -> str:
    """The reason in a line of a JSON log; another line as it is."""
    try:
        return str(json.loads(line)["reason"])
    except (ValueError, KeyError, TypeError):
        return line
