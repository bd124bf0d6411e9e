"""Client for use under faults: every write has a key and is repeated with it until acknowledged."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from threading import Lock

from benchmarks.faults.scripts import Json, Script, Step
from kvrecall.client import KvrecallClient, KvrecallError, TextDelta

GIVE_UP_SECONDS = 600.0
ANSWER_SECONDS = 60.0
# Error codes after which a client retries, as after every 429 and 503.
TRANSIENT_CODES = ("connection_failed", "stream_broken", "session_busy", "stale_epoch")


class NotServedError(Exception):
    """A write was not acknowledged for GIVE_UP_SECONDS, or was refused with a permanent error."""


@dataclass
class Counters:
    """Events that clients counted, summed over all clients."""

    acknowledged: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    unclear: Counter[str] = field(default_factory=Counter)
    torn_streams: list[str] = field(default_factory=list)
    not_durable: int = 0
    lock: Lock = field(default_factory=Lock)

    def count(self, counter: Counter[str], name: str) -> None:
        """Increment one count of `counter`."""
        with self.lock:
            counter[name] += 1


@dataclass
class Transcript:
    """The acknowledged part of a script: session ids, and answers by number of their step."""

    script: Script
    name: str
    sessions: dict[int, str] = field(default_factory=dict)
    answers: list[Json] = field(default_factory=list)

    def turns(self, session: int) -> list[tuple[Step, Json]]:
        """Acknowledged turns of a session with their answers, those before its fork included."""
        found: list[tuple[Step, Json]] = []
        for step, answer in zip(self.script.steps, self.answers, strict=False):
            if step.kind == "fork" and step.body["as"] == session:
                found = self.turns(step.session)[: step.body["turns"]]
            elif step.kind == "turn" and step.session == session:
                found.append((step, answer))
        return found


class FaultClient:
    """A client of a service with one or several gateways, for use by a single thread."""

    def __init__(self, urls: Sequence[str], counters: Counters, rng: Random) -> None:
        self._clients = [KvrecallClient(url, ANSWER_SECONDS) for url in urls]
        self._index = rng.randrange(len(urls))
        self._counters = counters
        self._rng = rng

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def run(self, transcript: Transcript) -> None:
        """Send all steps of a script, in new sessions. Raises NotServedError."""
        steps = transcript.script.steps
        for number in range(len(steps)):
            answer = self.send(transcript, number)
            transcript.answers.append(answer)
            self._counters.not_durable += not answer.get("durable", True)
            self._counters.count(self._counters.acknowledged, steps[number].kind)

    def send(self, transcript: Transcript, number: int) -> Json:
        """Send a step, for the first time or again, until acknowledged. Raises NotServedError."""
        step = transcript.script.steps[number]
        key = f"{transcript.name}-{number}"
        if step.kind in ("create", "fork"):
            return self._open(transcript, step, key)
        session = transcript.sessions[step.session]
        if step.kind == "event":
            return self._retry(lambda client: asdict(client.event(session, **step.body, key=key)))
        if step.stream:
            return self._retry(lambda client: self._stream(client, session, step, key))
        return self._retry(lambda client: asdict(client.turn(session, **step.body, key=key)))

    def delete_sessions(self, transcript: Transcript) -> None:
        """Delete the sessions of a script. Raises NotServedError."""
        for number, session in transcript.sessions.items():
            self._delete(session, f"{transcript.name}-delete-{number}")
            self._counters.count(self._counters.acknowledged, "delete")

    def get(self, session: str) -> Json:
        """The present state of a session. Raises NotServedError."""
        return self._retry(lambda client: asdict(client.get_session(session)))

    def _delete(self, session: str, key: str) -> None:
        def request(client: KvrecallClient) -> Json:
            client.delete_session(session, key=key)
            return {}

        self._retry(request)

    def _open(self, transcript: Transcript, step: Step, key: str) -> Json:
        if step.kind == "create":
            answer = self._retry(lambda client: asdict(client.create_session(**step.body, key=key)))
            transcript.sessions[step.session] = answer["id"]
        else:
            parent = transcript.sessions[step.session]
            turn = step.body["turn"]
            answer = self._retry(lambda client: asdict(client.fork(parent, turn=turn, key=key)))
            transcript.sessions[step.body["as"]] = answer["id"]
        return answer

    def _stream(self, client: KvrecallClient, session: str, step: Step, key: str) -> Json:
        """Answer of a streamed turn; counts a stream whose deltas are not the answer's text."""
        deltas: list[str] = []
        stream = client.stream(session, **step.body, key=key)
        for event in stream:
            if isinstance(event, TextDelta):
                deltas.append(event.text)
        answer = asdict(stream.read())
        if (text := "".join(deltas)) != (answer["message"]["content"] or ""):
            self._counters.torn_streams.append(f"{text!r}, but {answer['message']['content']!r}")
        return answer

    def _retry(self, request: Callable[[KvrecallClient], Json]) -> Json:
        last = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return request(self._clients[self._index])
            except KvrecallError as error:
                self._count_error(error)
                if time.monotonic() > last:
                    raise NotServedError(
                        f"not served for {GIVE_UP_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(self._rng.uniform(0.05, 0.5))

    def _count_error(self, error: KvrecallError) -> None:
        """Count a retryable error and switch to the next gateway.

        Raises NotServedError for any other error.
        """
        if error.status == 500:
            self._counters.count(self._counters.unclear, f"{error.code}: {error.detail}")
        elif error.code in TRANSIENT_CODES or error.status in (429, 503):
            self._counters.count(self._counters.retries, error.code)
        else:
            raise NotServedError(f"refused with a permanent error: {error}") from error
        self._index = (self._index + 1) % len(self._clients)
