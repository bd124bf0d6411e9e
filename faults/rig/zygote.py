"""A process that has imported everything and forks kvrecall commands, as Android's zygote does.

A start then costs a fraction of a second instead of seconds of imports, so that many more faults
and tests fit into an hour. The commands are processes like any other: they are killed, stopped and
restarted one by one. `python -m faults.rig.zygote FD MODULE...` imports the modules and
serves requests on a Unix socket.
"""

import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from select import select
from types import TracebackType
from typing import Any, Self

from kvrecall_server.app.logs import QUIET_LIBRARIES

COMMAND_LINE = "kvrecall_server.cli.__main__"
_REQUEST_BYTES = 1 << 16
_PIPES = 4  # input, output, errors, exit code
# What commands import late and what takes longest. None of these starts a thread.
IMPORTS = (
    "uvicorn.protocols.http.auto",
    "workers.rpc.server",
    "kvrecall_server.app.wiring",
    "torch.distributed.launcher.api",
)


class Zygote:
    """The client's side. `environment` is added to the zygote's own; `imports` are modules.

    Libraries write nothing by themselves, as in a command that logs JSON.
    """

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str] = IMPORTS) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *imports]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET_LIBRARIES, **environment},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def spawn(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], errors: int
    ) -> "ForkedProcess":
        """Run `main` of a module with these arguments. `errors` becomes its stderr."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        from_exit, exit_code = os.pipe()
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
        }
        try:
            with self._lock:
                data = [json.dumps(request).encode()]
                socket.send_fds(self._socket, data, [stdin, stdout, errors, exit_code])
                answer = self._socket.recv(_REQUEST_BYTES)
        finally:
            for end in (stdin, stdout, exit_code):
                os.close(end)
        if not answer:
            raise RuntimeError("the zygote has ended; see its output above")
        return ForkedProcess(int(answer), to_stdin, from_stdout, from_exit)

    def close(self) -> None:
        """End the zygote; its processes run on."""
        self._socket.close()
        self._process.wait()


class ForkedProcess:
    """A process of the zygote, with the part of `subprocess.Popen` that the set-ups use."""

    def __init__(self, pid: int, stdin: int, stdout: int, exit_code: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, "rb")
        self._stdin = stdin
        self._exit = exit_code
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()
        self.stdout.close()
        with suppress(OSError):
            os.close(self._stdin)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is None:
                if not select([self._exit], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                self.returncode = int(os.read(self._exit, 32) or -signal.SIGKILL)
                os.close(self._exit)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """Import the modules and serve requests until the client's end of the socket is closed."""
    number, *imports = sys.argv[1:]
    for module in imports:
        import_module(module)
    requests = socket.socket(fileno=int(number))
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                selector.unregister(key.fileobj)
                _report_exit(*key.data)
                continue
            data, pipes, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _PIPES)
            if not data:
                return
            if (pid := os.fork()) == 0:
                open_files = [each.fileobj for each in selector.get_map().values()]
                _become(json.loads(data), pipes, open_files)
                return
            for pipe in pipes[:3]:
                os.close(pipe)
            watched = os.pidfd_open(pid)
            selector.register(watched, selectors.EVENT_READ, (pid, watched, pipes[3]))
            requests.send(str(pid).encode())


def _report_exit(pid: int, watched: int, pipe: int) -> None:
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(pipe)
    os.close(watched)


def _become(request: Any, pipes: Sequence[int], open_files: Sequence[Any]) -> None:
    """Turn a forked process into the command, which runs to its end here."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.setsid()
    for target, pipe in enumerate(pipes[:3]):
        os.dup2(pipe, target)
    for file in (
        *pipes,
        *(each if isinstance(each, int) else each.fileno() for each in open_files),
    ):
        os.close(file)
    random.seed()
    sys.argv = ["kvrecall", *request["arguments"]]
    import_module(request["module"]).main()


if __name__ == "__main__":
    main()
