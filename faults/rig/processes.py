"""kvrecall commands as processes under faults, which can be killed, stopped and restarted."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from faults.rig import clock
from faults.rig.drive import Drive
from faults.rig.ports import local_ports
from faults.rig.zygote import ForkedProcess, Zygote
from kvrecall_server.app.errors import ServerNotReady
from kvrecall_server.app.local.server import wait_for_address

QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# The end of every wait for a condition. Generous: on a machine under load a process takes minutes
# to import its modules, and no wait lasts longer than its condition.
END_SECONDS = 600.0
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.2


Running = ForkedProcess | subprocess.Popen[bytes]


@dataclass
class ServerProcess:
    """A kvrecall command whose addresses survive a restart.

    The file `clock` beside its log shifts its wall clock. It is forked from `zygote`, if there is
    one, and writes to `drive`, if there is one. `pauses` are the monotonic times between which it
    was not listening, or was stopped. A worker of several ranks is several processes, of which the
    one that is started here is the launcher.
    """

    name: str
    command: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    zygote: Zygote | None = None
    drive: Drive | None = None
    running: Running | None = None
    refused_starts: int = 0
    pauses: list[list[float]] = field(default_factory=lambda: [[0.0, math.inf]])

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self.arguments[self._listen + 1].rpartition(":")[2])

    @property
    def _listen(self) -> int:
        names = list(self.arguments)
        return names.index("--port") if "--port" in names else names.index("--listen")

    @property
    def pid_file(self) -> Path:
        """File with the ids of its processes."""
        return self.folder / f"{self.name}.pid"

    @property
    def processes(self) -> list[int]:
        """Ids of all of its processes: those that write its log."""
        return processes_with(lambda errors, _: errors == str(self.log.absolute()))

    def undisturbed(self, start: float, end: float) -> bool:
        """True if it was listening, and not stopped, from `start` to `end`."""
        return not any(begun < end and start < over for begun, over in self.pauses)

    def local_ports(self) -> frozenset[int]:
        """Ports of its connections; none while it does not run."""
        return frozenset().union(*map(local_ports, self.processes))

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

    def start(self, patience: float = END_SECONDS) -> None:
        """Start it if it does not run and wait until it listens.

        A start that is refused, for instance on a full disk, is repeated. Raises ServerNotReady for
        a refusal after `patience` seconds.
        """
        last = time.monotonic() + patience
        while not self.alive:
            try:
                self._launch()
            except ServerNotReady:
                self.refused_starts += 1
                if time.monotonic() > last:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                self._resume()

    def choose_process(self, rng: Random) -> int | None:
        """Choose one of its processes by its id; None if it does not run."""
        found = self.processes
        return rng.choice(found) if len(found) > 1 else next(iter(found), None)

    def send(self, number: signal.Signals, process: int | None = None) -> None:
        """Send a signal to one of its processes, or to all of them."""
        if number != signal.SIGCONT:
            self._pause()
        for each in self.processes if process is None else [process]:
            _send(each, number)
        if number == signal.SIGCONT and self.alive:
            self._resume()

    def kill(self) -> None:
        """End it at once, all of its processes."""
        self._pause()
        if self.running is not None:
            self.running.kill()  # first: it may be starting others
        for each in self.processes:
            _send(each, signal.SIGKILL)
        self._await_end()

    def kill_one(self, rng: Random) -> None:
        """End one of its processes at once: where there are several, the others end by themselves.

        Raises TimeoutError if they do not.
        """
        self._pause()
        if (chosen := self.choose_process(rng)) is not None:
            _send(chosen, signal.SIGKILL)
        for each in self.processes:
            _send(each, signal.SIGCONT)
        self._await_end()

    def stop(self) -> int:
        """End it as an operator would, or kill it if it does not end; returns its exit code."""
        self._pause()
        if self.running is not None:
            self.running.send_signal(signal.SIGTERM)
        for each in self.processes:
            _send(each, signal.SIGCONT)
        return self._await_end()

    def start_and_kill(self, after: float) -> None:
        """Begin to start it and kill it `after` seconds later. Raises TimeoutError."""
        with self._spawn() as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(after)
            process.kill()
        self._await_end()

    def _pause(self) -> None:
        if self.pauses[-1][1] != math.inf:
            self.pauses.append([time.monotonic(), math.inf])

    def _resume(self) -> None:
        if self.pauses[-1][1] == math.inf:
            self.pauses[-1][1] = time.monotonic()

    @property
    def _environment(self) -> dict[str, str]:
        drive = {} if self.drive is None else self.drive.environment
        return {**os.environ, **QUIET, **self.environment, **drive}

    def _spawn(self) -> Running:
        if not self.clock.exists():
            clock.set_offset(self.clock, 0.0)
        if self.drive is not None:
            self.drive.arm()
        arguments = [self.command, "--until-input-ends", *self.arguments, "--log", "json"]
        with self.log.open("ab") as log:
            if self.zygote is not None:
                return self.zygote.spawn(
                    clock.__name__, [str(self.clock), *arguments], self._environment, log.fileno()
                )
            return subprocess.Popen(
                [sys.executable, *clock.PROGRAM, str(self.clock), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def _launch(self) -> None:
        """Start it and read its output up to the line with its address. Raises ServerNotReady."""
        process = self._spawn()
        try:
            wait_for_address(process, self.log)
        except ServerNotReady:
            with process:  # closes its pipes
                raise
        self.running = process
        self.pid_file.write_text(" ".join(map(str, self.processes)))

    def _await_end(self) -> int:
        """Wait for its end, or kill it; returns its exit code. Raises TimeoutError for a rank that stays."""
        code = 0
        if self.running is not None:
            process, self.running = self.running, None
            with process:
                try:
                    code = process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
        until(lambda: not self.processes, f"all processes of {self.name} have ended")
        return code


def _send(process: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def until(holds: Callable[[], object], condition: str, seconds: float = END_SECONDS) -> None:
    """Wait until `holds()` is true. Raises TimeoutError with the description of the condition."""
    last = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > last:
            raise TimeoutError(f"not within {seconds:.0f} s: {condition}")
        time.sleep(_POLL_SECONDS)


def processes_under(folder: Path) -> list[int]:
    """Ids of the processes that log to this folder or have an argument that is a path in it.

    Not those of a folder whose name begins with this one's, which another round may own.
    """
    inside = f"{folder}{os.sep}"
    return processes_with(
        lambda errors, arguments: errors.startswith(inside) or inside.encode() in arguments
    )


def processes_with(holds: Callable[[str, bytes], bool]) -> list[int]:
    """Ids of the other processes of whose standard error's file and arguments `holds` is true, ascending."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                errors = os.readlink(entry / "fd" / "2")
                if holds(errors, (entry / "cmdline").read_bytes()):
                    found.append(int(entry.name))
    return sorted(found)
