"""kvrecall as a peer: `kvrecall serve` in a process of its own, through its client."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.conversation import Message, Turn
from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.subjects.base import Reply, process_environment
from kvrecall.client import KvrecallClient, SessionOptions
from kvrecall.client.events import TextDelta
from kvrecall_server.app.local.server import launch


class KvrecallService:
    """A session of `kvrecall serve`, whose data is in `folder`; `rows` None leaves its budget out.

    With `pause` seconds a tool's pause is reported to the service, which repairs in it; None lets
    every pause pass in no time. quantize: bits of the weights; None for those of the file in bfloat16.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        threads: int,
        rows: int | None,
        options: SessionOptions,
        pause: float | None,
        quantize: str | None = None,
    ) -> None:
        self._arguments = ["--model", model, "--data", str(folder / "data"), "--log", "json"]
        self._arguments += ["--host", "127.0.0.1", "--port", "0"]
        self._arguments += ["--slots", "1"]
        self._arguments += [] if rows is None else ["--budget", str(rows)]
        self._arguments += [] if quantize is None else ["--quantize", quantize]
        self._log = folder / "server.log"
        self._environment: Mapping[str, str] = process_environment(threads)
        self._options = options
        self._pause = pause
        self._process: subprocess.Popen[bytes] | None = None
        self._client: KvrecallClient | None = None
        self._session = ""
        self.length = 0
        self.versions = {name: version(name) for name in ("kvrecall", "transformers", "torch")}

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise PeerFailed("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Start the server on the session's data and wait until it is ready."""
        self._process, address = launch(self._arguments, self._log, environment=self._environment)
        self._client = KvrecallClient(address)
        while not self._client.ready():
            time.sleep(0.05)

    def call(self, messages: Sequence[Message]) -> None:
        """Append messages; the first ones create the session."""
        client = self._connected()
        if not self._session:
            self._session = client.create_session(**self._options).id
        turn = client.turn(self._session, messages, generate=False)
        self.length = turn.memory.length

    def pause(self, turn: Turn, call_id: str) -> bool:
        """Report the call, half a pause later its result, and wait for the other half."""
        if self._pause is None:
            return False
        client = self._connected()
        client.event(self._session, "tool_call.started", call_id)
        time.sleep(self._pause / 2)
        client.event(self._session, "tool_call.completed", call_id, result=turn.result)
        time.sleep(self._pause / 2)
        return True

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Append messages, generate a reply; the time is that of the client from its request on."""
        started = time.perf_counter()
        moments = list[float]()
        settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        with self._connected().stream(self._session, messages, **settings) as stream:
            for event in stream:
                if isinstance(event, TextDelta):
                    moments.append(time.perf_counter() - started)
            turn = stream.read()
        first = moments[0] if moments else time.perf_counter() - started
        self.length = turn.memory.length
        # The end of the turn is a token of its usage.
        tokens = turn.usage.output_tokens - (turn.finish_reason == "stop")
        return Reply(turn.text, tokens, first, moments[-1] - first if moments else 0.0)

    def kill(self) -> None:
        """Kill the server's process."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def _connected(self) -> KvrecallClient:
        if self._client is None:
            raise PeerFailed("the server does not run")
        return self._client
