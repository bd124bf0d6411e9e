"""Ranks of a worker that its launcher forks, where it would start a program that imports everything anew.

All else of torch's launcher is as it is: ranks are sessions of their own, with its environment.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

_OWN_FILES = 3  # input, output, errors
_POLL_SECONDS = 0.05
# What a rank's launcher handles.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ForkedRank:
    """A rank's process, with the part of `subprocess.Popen` that torch's launcher uses."""

    def __init__(
        self, main: Callable[[], None], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Fork a process that runs `main`, in a session of its own, with these arguments."""
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(main, arguments, environment)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        last = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if last is not None and time.monotonic() > last:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


def fork_ranks(main: Callable[[], None]) -> None:
    """Let torch's launcher in this process fork its ranks, which run `main`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def fork(_: object, command: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        # The program's name, "-m" and a module come before its arguments.
        return ForkedRank(main, command[3:], environment)

    vars(subprocess_handler)["SubprocessHandler"]._popen = fork


def _become(
    main: Callable[[], None], arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run `main` to its end; the launcher's threads are not there, and what it would undo is its own."""
    os.setsid()
    os.closerange(_OWN_FILES, os.sysconf("SC_OPEN_MAX"))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = ["kvrecall", *arguments]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
