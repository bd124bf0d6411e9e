"""Client for use under faults: every write has a key and is repeated with it until acknowledged."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from random import Random
from typing import TypeVar

from faults.load.counters import Counters
from faults.load.scripts import Json, Step
from faults.load.transcript import Transcript
from kvrecall.client import KvrecallClient, KvrecallError, TextDelta

T = TypeVar("T")
GIVE_UP_SECONDS = 600.0
ANSWER_SECONDS = 60.0
# Error codes after which a client retries, as after every 429 and 5xx.
TRANSIENT_CODES = ("connection_failed", "stream_broken", "session_busy", "stale_epoch")


class NotServedError(Exception):
    """A write was not acknowledged for GIVE_UP_SECONDS, or was refused with a permanent error."""


def is_transient(error: KvrecallError) -> bool:
    """True for an error after which the same request may succeed."""
    return error.code in TRANSIENT_CODES or error.status == 429 or error.status >= 500


class FaultClient:
    """A client of a service with one or several gateways, for use by a single thread.

    `calm`: it leaves out aborted turns and moves, which change no answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        counters: Counters,
        rng: Random,
        calm: bool = False,
        tenant: str = "",
    ) -> None:
        self._urls = urls
        self._clients = [KvrecallClient(url, ANSWER_SECONDS, tenant=tenant) for url in urls]
        self._index = rng.randrange(len(urls))
        self.counters = counters
        self._rng = rng
        self._calm = calm

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def run(self, transcript: Transcript, end: int | None = None) -> None:
        """Send the steps of a script up to number `end` that were not sent. Raises NotServedError.

        Ends early when the transcript is voided.
        """
        steps = transcript.script.steps
        for number in range(len(transcript.answers), len(steps) if end is None else end):
            answer = self.send(transcript, number)
            transcript.answers.append(answer)
            self.counters.not_durable += not answer.get("durable", True)
            self.counters.count(self.counters.acknowledged, steps[number].kind)
            step = steps[number]
            if step.kind == "turn" and answer["turn"] > len(transcript.turns(step.session)):
                transcript.voided = True
                self.counters.count(self.counters.other, "aborted turns that were committed")
                return

    def send(self, transcript: Transcript, number: int) -> Json:
        """Send a step, for the first time or again, until acknowledged. Raises NotServedError."""
        step = transcript.script.steps[number]
        key = f"{transcript.name}-{number}"
        if step.kind in ("create", "fork"):
            return self._open(transcript, step, key)
        session = transcript.sessions[step.session]
        if step.kind == "event":
            return self.retry(lambda client: asdict(client.event(session, **step.body, key=key)))
        if step.kind == "abort":
            return {} if self._calm else self.abort(session, step.body)
        if step.kind == "move":
            return {} if self._calm else self.move(session)
        if step.stream:
            return self.retry(lambda client: self._stream(client, session, step, key))
        return self.retry(lambda client: asdict(client.turn(session, **step.body, key=key)))

    def abort(self, session: str, body: Json) -> Json:
        """Stream a turn without a key, and leave after its first words."""
        client = self._clients[self._index]
        with (
            suppress(KvrecallError),
            self.counters.attempt(self.url),
            client.stream(session, **body) as stream,
        ):
            for event in stream:
                if isinstance(event, TextDelta):
                    break
        return {}

    def move(self, session: str) -> Json:
        """Move a session once; a service that cannot, now, changes nothing."""
        with suppress(KvrecallError), self.counters.attempt(self.url):
            self._clients[self._index].move(session)
            self.counters.count(self.counters.other, "moves")
        return {}

    def delete_sessions(self, transcript: Transcript) -> None:
        """Delete the sessions of a script, parents first. Raises NotServedError."""
        for number, session in transcript.sessions.items():
            self.delete(session, f"{transcript.name}-delete-{number}")

    def delete(self, session: str, key: str) -> None:
        """Delete a session. Raises NotServedError."""

        def request(client: KvrecallClient) -> Json:
            client.delete_session(session, key=key)
            return {}

        self.retry(request)
        self.counters.count(self.counters.acknowledged, "delete")

    @property
    def url(self) -> str:
        """Address of the gateway that is in use."""
        return self._urls[self._index]

    def fork(self, parent: str, key: str, turn: int | None = None, queue: bool = False) -> Json:
        """Fork a session. Raises NotServedError."""
        return self.retry_at(
            lambda _: asdict(
                self._clients[self._index].fork(parent, turn=turn, queue=queue, key=key)
            )
        )

    def retry(self, request: Callable[[KvrecallClient], T]) -> T:
        """Send a request until it is answered, to one gateway after the other.

        Raises NotServedError.
        """
        return self.retry_at(lambda _: request(self._clients[self._index]))

    def retry_at(self, request: Callable[[str], T]) -> T:
        """As `retry`, for a request that is sent to a gateway by its address."""
        last = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                with self.counters.attempt(self.url):
                    return request(self.url)
            except KvrecallError as error:
                self._next_gateway(error)
                if time.monotonic() > last:
                    raise NotServedError(
                        f"not served for {GIVE_UP_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(self._rng.uniform(0.05, 0.5))

    def _open(self, transcript: Transcript, step: Step, key: str) -> Json:
        if step.kind == "create":
            answer = self.retry(lambda client: asdict(client.create_session(**step.body, key=key)))
            transcript.sessions[step.session] = answer["id"]
        else:
            parent = transcript.sessions[step.session]
            turn = step.body["turn"]
            answer = self.fork(parent, key, turn)
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
        # A message has no white space at its ends, of which a stream cannot know.
        if (text := "".join(deltas)).strip() != (answer["message"]["content"] or "").strip():
            self.counters.torn_streams.append(f"{text!r}, but {answer['message']['content']!r}")
        return answer

    def _next_gateway(self, error: KvrecallError) -> None:
        """Switch to the next gateway after a transient error. Raises NotServedError for others."""
        if not is_transient(error):
            raise NotServedError(f"refused with a permanent error: {error}") from error
        if error.status < 500:
            self.counters.count(self.counters.retries, error.code)
        self._index = (self._index + 1) % len(self._clients)
