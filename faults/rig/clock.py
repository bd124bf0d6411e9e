"""A kvrecall command with a shifted wall clock: `python -m faults.rig.clock FILE serve`.

The file holds the shift in seconds and may change at any moment. The monotonic clock is unchanged,
as on a machine whose clock is set. KVRECALL_FAULTS_PATCH names a module whose `apply` changes the
command's code first.
"""

import mmap
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from struct import Struct
from types import ModuleType

from faults.rig.ranks import fork_ranks

PATCH = "KVRECALL_FAULTS_PATCH"
RANKS = "--tensor-parallel"
PROGRAM = ("-m", "faults.rig.clock")
_OFFSET = Struct("<d")
_NANOSECONDS = 1_000_000_000


def set_offset(file: Path, seconds: float) -> None:
    """Shift the clock of every process with this file by `seconds` from the true time."""
    with file.open("r+b" if file.exists() else "w+b") as written:
        written.write(_OFFSET.pack(seconds))


def follow(file: Path) -> None:
    """Replace this process's wall clock by one that is shifted by the file's value."""
    with file.open("rb") as read:
        offset = mmap.mmap(read.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    true_time = time.time
    true_time_ns = time.time_ns
    _keep_true_time_in_grpc()

    def seconds() -> float:
        return float(_OFFSET.unpack_from(offset)[0])

    time.time = lambda: true_time() + seconds()
    time.time_ns = lambda: true_time_ns() + int(seconds() * _NANOSECONDS)


def _keep_true_time_in_grpc() -> None:
    """Leave gRPC the true time.

    Its C core compares deadlines, which are wall-clock times, with the machine's clock.
    """
    import grpc.aio  # imported here, before the command's own modules

    true = ModuleType("time")
    vars(true).update(vars(time))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == grpc.__name__ and vars(module).get("time") is time:
            vars(module)["time"] = true


def main() -> None:
    """Run kvrecall's command line under the clock of the file in the first argument."""
    program, file, *rest = sys.argv
    follow(Path(file))
    sys.argv = [program, *rest]
    # Imported now: modules that import `time.time` by name must get the replacement.
    from kvrecall_server.cli.commands import app

    if patch := os.environ.get(PATCH):
        import_module(patch).apply()
    if RANKS in rest:
        # Its ranks have this clock, too.
        fork_ranks(app)
    app()


if __name__ == "__main__":
    main()
