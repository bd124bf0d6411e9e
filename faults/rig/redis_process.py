"""Redis servers of benchmarks, which faults may hit."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import redis

from faults.rig.drive import Drive
from faults.rig.ports import free_port
from faults.rig.processes import END_SECONDS, until
from faults.rig.redis_servers import find_server


class Startable(Protocol):
    """A server or a group of them."""

    def start(self) -> None:
        """Start it and wait until it answers."""

    def kill(self) -> None:
        """Kill it."""


Server = TypeVar("Server", bound=Startable)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start a server, and kill it at the end."""
    try:
        server.start()
        yield server
    finally:
        server.kill()


class RedisProcess:
    """A redis-server that syncs every write before it answers, with data that survives a kill.

    `settings` replace or add to its configuration. With a `primary` it starts as its replica, with
    lines of `config` as a sentinel.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        drive: Drive | None = None,
        config: Sequence[str] = (),
        primary: "RedisProcess | None" = None,
    ) -> None:
        self.port = free_port()
        self.folder = folder
        self.settings = dict(settings or {})
        self._config = config
        self.primary = primary
        self.drive = drive
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        """Its URL, without a proxy."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it if it does not run and wait until it answers.

        Raises RuntimeError if it ends instead, TimeoutError.
        """
        if self.alive:
            return
        options = self._sentinel_options() if self._config else self._options()
        environment = dict(os.environ)
        if self.drive is not None:
            self.drive.arm()
            environment |= self.drive.environment
        self._process = subprocess.Popen(
            [find_server(), *options],
            start_new_session=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        until(self._answers, f"the Redis on port {self.port} answers")

    def _options(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-percentage": "0",
            "logfile": str(self.folder.with_suffix(".log")),
            "maxmemory-policy": "noeviction",
        } | self.settings
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        if self.primary is not None:
            options += ["--replicaof", "127.0.0.1", str(self.primary.port)]
        return options

    def _sentinel_options(self) -> list[str]:
        """A sentinel writes what it learns into its configuration file."""
        file = self.folder / "sentinel.conf"
        if not file.exists():
            lines = ["bind 127.0.0.1", f"port {self.port}", f"dir {self.folder}", *self._config]
            file.write_text("\n".join(lines), encoding="utf-8")
        return [str(file), "--sentinel"]

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill -9; what it wrote survives, what was in its memory does not."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End it as an operator would, with everything that it was sent on its disk."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()

    def client(self) -> "redis.Redis":
        """A new connection to it."""
        return redis.Redis(port=self.port, socket_timeout=END_SECONDS)

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(
                f"the Redis on port {self.port} ended; see the log beside its folder"
            )
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
