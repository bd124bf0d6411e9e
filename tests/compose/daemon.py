"""A Docker daemon for the tests: the one that answers, else one of their own.

Their own has a folder for its images and a socket beside it, both in the user's cache directory, so that
a second run builds on the first one's layers. `python -m tests.compose.daemon` ends with 0 where a daemon
can be had, else with 69 (sysexits' "unavailable") and a line that says why not.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.compose.docker import Docker
from tests.conftest import until

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrecall-docker"
# Of Debian's packages docker.io and iptables.
PROGRAMS = ("docker", "dockerd", "containerd", "runc", "iptables")
START_SECONDS = 60.0
STOP_SECONDS = 60.0


class NoDocker(RuntimeError):
    """No daemon answers and none can be started; the message says what is missing."""


@contextmanager
def find_daemon(folder: Path = FOLDER) -> Iterator[Docker]:
    """Yield the daemon that answers, or start one and stop it afterwards. Raises NoDocker."""
    docker = Docker()
    if docker.succeeds("info"):
        yield docker
        return
    check_programs()
    folder.mkdir(parents=True, exist_ok=True)
    socket = f"unix://{folder}/docker.sock"
    with _start(folder, socket) as process:
        docker = Docker({"DOCKER_HOST": socket})
        try:
            _wait_for(docker, process, folder / "dockerd.log")
            yield docker
        finally:
            _stop(process, folder / "exec")


def check_programs() -> None:
    """Raise NoDocker if something that a daemon of our own needs is missing."""
    if os.getuid() != 0:
        raise NoDocker("no Docker daemon answers, and only root can start one: start dockerd")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoDocker(
            f"no Docker daemon answers, and to start one {', '.join(missing)} is missing: "
            "install Debian's packages docker.io and iptables"
        )


def _start(folder: Path, socket: str) -> "subprocess.Popen[bytes]":
    with (folder / "dockerd.log").open("wb") as log:
        return subprocess.Popen(
            [
                "dockerd",
                f"--host={socket}",
                f"--data-root={folder / 'data'}",
                f"--exec-root={folder / 'exec'}",
                f"--pidfile={folder / 'dockerd.pid'}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C ends the tests; they end the daemon when their containers are gone.
            start_new_session=True,
        )


def _wait_for(docker: Docker, process: "subprocess.Popen[bytes]", log: Path) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise NoDocker(f"dockerd cannot start here: {''.join(last)} (all of it: {log})")
        return docker.succeeds("info")

    try:
        until(answers, "dockerd answers", START_SECONDS)
    except AssertionError as error:
        raise NoDocker(
            f"dockerd does not answer within {START_SECONDS:.0f} s: see {log}"
        ) from error


def _stop(process: "subprocess.Popen[bytes]", state: Path) -> None:
    """End it. It leaves its own network namespace mounted, in the folder of its state."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    namespace = state / "netns" / "default"
    if namespace.exists():
        subprocess.run(["umount", str(namespace)], capture_output=True)


def main() -> int:
    """Say whether a daemon can be had."""
    try:
        with find_daemon():
            return 0
    except NoDocker as error:
        print(error)
        return os.EX_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
