"""A peer that is a program of `benchmarks.peers.programs`: token ids in, tokens out."""

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.conversation import Message, Turn
from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.subjects.base import Reply, process_environment
from benchmarks.peers.subjects.history import History
from workers.model.tokenizer import ChatTokenizer


class TokenProcess:
    """A session on a program that gets all token ids at every request.

    `command` starts it in the folder `at`.
    """

    def __init__(
        self, command: Sequence[str], at: Path, threads: int, tokenizer: ChatTokenizer
    ) -> None:
        self._command = list(command)
        self._at = at
        self._environment = process_environment(threads)
        self._history = History(tokenizer)
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self._running().pid

    @property
    def length(self) -> int:
        """Tokens of the session so far."""
        return len(self._history.token_ids)

    def start(self) -> None:
        """Start the program and wait until it is ready. Raises PeerFailed."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, cwd=self._at, env=self._environment, stdin=pipe, stdout=pipe, text=True
        )
        self.versions = json.loads(self._read_line())

    def call(self, messages: Sequence[Message]) -> None:
        """Append messages; a program that keeps its cache prefills them."""
        self._history.append(messages, generate=False)
        for _ in self._request(0):
            raise PeerFailed("the program answered a request for no tokens with one")

    def pause(self, turn: Turn, call_id: str) -> bool:
        """Nothing: the program has nothing to do in a pause."""
        return False

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Append messages, generate a reply; the time is that from the request on."""
        self._history.append(messages, generate=True)
        started = time.perf_counter()
        return self._history.receive_reply(self._request(max_tokens), started)

    def kill(self) -> None:
        """Kill the program."""
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def _request(self, max_tokens: int) -> Iterator[int]:
        request: dict[str, Any] = {
            "prompt": self._history.token_ids,
            "last": self._history.last,
            "max_tokens": max_tokens,
        }
        stdin = self._running().stdin
        assert stdin is not None, "the program was started with a pipe"
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        while (line := self._read_line()) != "end":
            yield int(line)

    def _read_line(self) -> str:
        stdout = self._running().stdout
        assert stdout is not None, "the program was started with a pipe"
        if not (line := stdout.readline()):
            raise PeerFailed(f"{Path(self._command[0]).name} ended; its error is above")
        return line.strip()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            raise PeerFailed("the program does not run")
        return self._process
