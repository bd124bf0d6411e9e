"""A command of ours under a wall clock that is off: `python -m benchmarks.faults.clock FILE serve ...`.

The file says by how many seconds, and may say otherwise at any moment. What waits by the monotonic clock is left alone,
as a machine's own clock does when it is set.
"""

import mmap
import sys
import time
from pathlib import Path
from struct import Struct
from types import ModuleType

PROGRAM = ("-m", "benchmarks.faults.clock")
_OFFSET = Struct("<d")
_NANOSECONDS = 1_000_000_000


def set_offset(file: Path, seconds: float) -> None:
    """Have every process with this file be `seconds` ahead of the true time, from now on."""
    with file.open("r+b" if file.exists() else "w+b") as written:
        written.write(_OFFSET.pack(seconds))


def follow(file: Path) -> None:
    """Replace this process's wall clock by one that is off as the file says."""
    with file.open("rb") as read:
        offset = mmap.mmap(read.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    true_time = time.time
    true_time_ns = time.time_ns
    _spare_grpc()

    def seconds() -> float:
        return float(_OFFSET.unpack_from(offset)[0])

    time.time = lambda: true_time() + seconds()
    time.time_ns = lambda: true_time_ns() + int(seconds() * _NANOSECONDS)


def _spare_grpc() -> None:
    """Leave gRPC the true time: its C core holds deadlines, which are wall-clock times, against the machine's clock."""
    import grpc.aio  # only here, where nothing else was imported yet

    true = ModuleType("time")
    vars(true).update(vars(time))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == grpc.__name__ and vars(module).get("time") is time:
            vars(module)["time"] = true


def main() -> None:
    """Run the command line's application under the clock of the file that is named first."""
    program, file, *rest = sys.argv
    follow(Path(file))
    sys.argv = [program, *rest]
    # Only now: what imports `time.time` by its name must find the other one.
    from kvrecall.cli.commands import app

    app()


if __name__ == "__main__":
    main()
