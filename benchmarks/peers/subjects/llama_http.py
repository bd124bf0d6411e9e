"""llama.cpp's server as a peer: `/completion` with `cache_prompt` on one slot, over HTTP."""

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.peers.conversation import Message, Turn
from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.subjects.base import Reply, process_environment
from benchmarks.peers.subjects.history import History
from workers.model.tokenizer import ChatTokenizer

_SLOT_FILE = "session.bin"


class LlamaServer:
    """A session in the slot of a server that `command` starts.

    With `save_slot` the slot's state is written to a file behind every reply and read again after
    a start, as the server's API offers it.
    """

    def __init__(
        self, command: Sequence[str], threads: int, tokenizer: ChatTokenizer, save_slot: bool
    ) -> None:
        self._command = command
        self._environment = process_environment(threads)
        self._history = History(tokenizer)
        self._ends = set(tokenizer.eos_token_ids)
        self._save_slot = save_slot
        self._process: subprocess.Popen[str] | None = None
        self._http = httpx.Client()
        self._restore = False
        self.versions: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise PeerFailed("the server does not run")
        return self._process.pid

    @property
    def length(self) -> int:
        """Tokens of the session so far."""
        return len(self._history.token_ids)

    def start(self) -> None:
        """Start the server; a saved state is read with the first request. Raises PeerFailed."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None, "the server was started with a pipe"
        if not (line := self._process.stdout.readline()):
            raise PeerFailed("the server ended; its error is above")
        ready = json.loads(line)
        self.versions = ready["versions"]
        # The server closes its connections without a word: each request has one of its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=ready["address"], timeout=None, limits=limits)
        self._restore = self._save_slot and self.length > 0

    def call(self, messages: Sequence[Message]) -> None:
        """Append messages and prefill them."""
        self._history.append(messages, generate=False)
        for _ in self._complete(0):
            pass  # a token that was not asked for
        self._save()

    def pause(self, turn: Turn, call_id: str) -> bool:
        """Nothing: the server has nothing to do in a pause."""
        return False

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Append messages, generate a reply; the time is that from the request on."""
        self._history.append(messages, generate=True)
        started = time.perf_counter()
        if self._restore:
            self._slot("restore")
            self._restore = False
        reply = self._history.receive_reply(self._complete(max_tokens), started)
        return replace(reply, after=self._save())

    def kill(self) -> None:
        """Kill the server."""
        self._http.close()
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def _complete(self, max_tokens: int) -> Iterator[int]:
        """Send the session; yields each token of the reply as it comes."""
        request = {
            "prompt": self._history.token_ids,
            "n_predict": max_tokens,
            "cache_prompt": True,
            "id_slot": 0,
            "temperature": 0.0,
            "stream": True,
            "return_tokens": True,
        }
        try:
            with self._http.stream("POST", "/completion", json=request) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    for token in read_tokens(line):
                        if token not in self._ends:
                            yield token
        except httpx.HTTPError as error:
            raise PeerFailed(f"the server did not answer: {error}") from error

    def _save(self) -> float:
        """Write the slot's state; returns the seconds that it took."""
        if not self._save_slot:
            return 0.0
        started = time.perf_counter()
        self._slot("save")
        return time.perf_counter() - started

    def _slot(self, action: str) -> None:
        try:
            answer = self._http.post(f"/slots/0?action={action}", json={"filename": _SLOT_FILE})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise PeerFailed(f"the slot's state: {action} failed: {error}") from error


def read_tokens(line: str) -> list[int]:
    """Token ids of a line of the server's event stream, none of its last event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise PeerFailed(f"the server refused a request: {event['error']}")
    return [] if event.get("stop") else [int(token) for token in event.get("tokens", [])]
