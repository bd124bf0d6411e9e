"""A worker in processes of its own, see `program`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks.ranks.sizes import Sizes
from benchmarks.subjects import Timed

_PROGRAM = "benchmarks.ranks.program"
_LAUNCHER = "torch.distributed.run"
_STOP_SECONDS = 60


class WorkerEnded(Exception):
    """A worker has ended before it has answered; its error is above."""


class Arm:
    """A running worker, over the pipes to it."""

    def __init__(self, asked: IO[str], answers: IO[str]) -> None:
        """Wait until the worker is ready. Raises WorkerEnded."""
        self._asked = asked
        self._answers = answers
        self._read_line()

    def turn(self, method: str, text: str, output_tokens: int) -> Timed:
        """Take a turn in the session of a method. Raises WorkerEnded."""
        print(json.dumps((method, text, output_tokens)), file=self._asked, flush=True)
        return Timed(**json.loads(self._read_line()))

    def _read_line(self) -> str:
        if not (line := self._answers.readline()):
            raise WorkerEnded("a worker has ended; its error is above")
        return line


@contextmanager
def start_arm(ranks: int, data: Path, sizes: Sizes) -> Iterator[Arm]:
    """Start a worker of so many processes, and end it."""
    launcher = ("-m", _LAUNCHER, "--standalone", f"--nproc-per-node={ranks}")
    program = ("-m", _PROGRAM, str(data), json.dumps(asdict(sizes)))
    command = [sys.executable, *(launcher if ranks > 1 else ()), *program]
    environment = os.environ | {"OMP_NUM_THREADS": str(sizes.threads)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            yield Arm(process.stdin, process.stdout)
            process.stdin.close()
            process.wait(_STOP_SECONDS)
        finally:
            process.terminate()
