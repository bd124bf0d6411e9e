"""One child process that compiles grammars, as its user sees it."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrecall.sandbox import child
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.verdict import SandboxBusy, Verdict

Vocabulary = Callable[[], dict[str, Any]]

# Loading a vocabulary takes a second; a machine may be busy.
_START_SECONDS = 60.0
# The child ends a compilation by itself at its time limit; so much later it is taken for broken.
_GRACE_SECONDS = 5.0


class SandboxProcess:
    """A child process, started at the first grammar, and again after one that broke it.

    One thread at a time calls its methods; any may `kill`. `vocabulary` builds keyword arguments of
    `LLTokenizer`, in JSON's types; None: grammars are compiled without one.
    """

    def __init__(self, settings: SandboxSettings, vocabulary: Vocabulary | None) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, grammar: str) -> Verdict:
        """Compile a grammar. Raises SandboxBusy if there was no time for it, or no process."""
        try:
            if self._process is None:
                self._start()
            answer = self._ask(grammar, self._settings.seconds + _GRACE_SECONDS)
        except (OSError, SandboxBusy) as error:
            self.close()
            raise SandboxBusy(f"the process that compiles grammars failed: {error}") from error
        except BaseException:
            self.close()  # it may be set up by half, or have an answer that nobody has read
            raise
        return self._read(answer)

    def kill(self) -> None:
        """End the process: the grammar being compiled is lost."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one, and forget it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(child.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # it must have one thread
            start_new_session=True,  # Ctrl-C is for the service, which closes it
        )
        limits = self._settings.model_dump(include={"cpu_seconds", "memory_bytes", "seconds"})
        vocabulary = None if self._vocabulary is None else self._vocabulary()
        self._ask({**limits, "vocabulary": vocabulary}, _START_SECONDS)

    def _ask(self, value: Any, seconds: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        child.write_frame(self._process.stdin, value)
        answered = select.poll()  # `select.select` takes no descriptor from 1024 on
        answered.register(self._process.stdout, select.POLLIN)
        if not answered.poll(seconds * 1000):
            raise SandboxBusy("it does not answer")
        answer = child.read_frame(self._process.stdout)
        if answer is None:
            raise SandboxBusy("it has ended")
        return answer

    def _read(self, answer: dict[str, Any]) -> Verdict:
        seconds, size = answer["cpu_seconds"], answer["memory_bytes"]
        problem = answer["problem"]
        exhausted = False
        if answer["out_of_time"]:
            most = self._settings.cpu_seconds
            problem, exhausted = f"it is too complex: it takes over {most} s to compile", True
        elif answer["late"]:
            limit = self._settings.seconds
            raise SandboxBusy(f"the machine had no time for it within {limit:g} s", seconds)
        elif not answer["complete"]:
            most = self._settings.memory_bytes >> 20
            problem = f"it is too complex: it takes over {most} MiB to compile, or nests too deep"
            exhausted = True
        return Verdict(problem, seconds, size, exhausted)
