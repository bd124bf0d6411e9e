"""How a client speaks while things break: every write has a key, and is sent again with it until it is acknowledged."""

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
PASSING = ("connection_failed", "stream_broken", "session_busy", "stale_epoch")
"""Codes after which a client tries again, as after every 429 and 503."""


class NotServedError(Exception):
    """A write was not acknowledged for minutes, or refused in a way that no retry can mend."""


@dataclass
class Tally:
    """What clients met, counted over all of them."""

    acknowledged: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    unclear: Counter[str] = field(default_factory=Counter)
    torn_streams: list[str] = field(default_factory=list)
    not_durable: int = 0
    lock: Lock = field(default_factory=Lock)

    def count(self, counter: Counter[str], name: str) -> None:
        """Note one more."""
        with self.lock:
            counter[name] += 1


@dataclass
class Told:
    """A script as far as it was acknowledged: its sessions, and the answers by the number of their step."""

    script: Script
    name: str
    sessions: dict[int, str] = field(default_factory=dict)
    answers: list[Json] = field(default_factory=list)

    def turns_of(self, who: int) -> list[tuple[Step, Json]]:
        """The acknowledged turns of a session and their answers, those of before its fork included."""
        found: list[tuple[Step, Json]] = []
        for step, answer in zip(self.script.steps, self.answers, strict=False):
            if step.kind == "fork" and step.body["as"] == who:
                found = self.turns_of(step.who)[: step.body["turns"]]
            elif step.kind == "turn" and step.who == who:
                found.append((step, answer))
        return found


class FaultClient:
    """A client of a service with one or several front doors. For one thread."""

    def __init__(self, urls: Sequence[str], tally: Tally, rng: Random) -> None:
        self._clients = [KvrecallClient(url, ANSWER_SECONDS) for url in urls]
        self._at = rng.randrange(len(urls))
        self._tally = tally
        self._rng = rng

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def tell(self, told: Told) -> None:
        """Take all steps of a script in new sessions. Raises NotServedError."""
        steps = told.script.steps
        for number in range(len(steps)):
            answer = self.take(told, number)
            told.answers.append(answer)
            self._tally.not_durable += not answer.get("durable", True)
            self._tally.count(self._tally.acknowledged, steps[number].kind)

    def take(self, told: Told, number: int) -> Json:
        """Send a step, for the first time or again, until it is acknowledged. Raises NotServedError."""
        step = told.script.steps[number]
        key = f"{told.name}-{number}"
        if step.kind in ("create", "fork"):
            return self._take_new(told, step, key)
        session = told.sessions[step.who]
        if step.kind == "event":
            return self._insist(lambda client: asdict(client.event(session, **step.body, key=key)))
        if step.stream:
            return self._insist(lambda client: self._streamed(client, session, step, key))
        return self._insist(lambda client: asdict(client.turn(session, **step.body, key=key)))

    def forget(self, told: Told) -> None:
        """Delete the sessions of a script. Raises NotServedError."""
        for who, session in told.sessions.items():
            self._delete(session, f"{told.name}-delete-{who}")
            self._tally.count(self._tally.acknowledged, "delete")

    def get(self, session: str) -> Json:
        """A session as it is now. Raises NotServedError."""
        return self._insist(lambda client: asdict(client.get_session(session)))

    def _delete(self, session: str, key: str) -> None:
        def request(client: KvrecallClient) -> Json:
            client.delete_session(session, key=key)
            return {}

        self._insist(request)

    def _take_new(self, told: Told, step: Step, key: str) -> Json:
        if step.kind == "create":
            answer = self._insist(
                lambda client: asdict(client.create_session(**step.body, key=key))
            )
            told.sessions[step.who] = answer["id"]
        else:
            parent = told.sessions[step.who]
            at = step.body["turn"]
            answer = self._insist(lambda client: asdict(client.fork(parent, turn=at, key=key)))
            told.sessions[step.body["as"]] = answer["id"]
        return answer

    def _streamed(self, client: KvrecallClient, session: str, step: Step, key: str) -> Json:
        """A streamed turn's answer; what was said piece by piece must be what was said."""
        pieces: list[str] = []
        stream = client.stream(session, **step.body, key=key)
        for event in stream:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
        answer = asdict(stream.read())
        if (said := "".join(pieces)) != (answer["message"]["content"] or ""):
            self._tally.torn_streams.append(f"{said!r}, but {answer['message']['content']!r}")
        return answer

    def _insist(self, request: Callable[[KvrecallClient], Json]) -> Json:
        last = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return request(self._clients[self._at])
            except KvrecallError as error:
                self._take_note(error)
                if time.monotonic() > last:
                    raise NotServedError(
                        f"not served for {GIVE_UP_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(self._rng.uniform(0.05, 0.5))

    def _take_note(self, error: KvrecallError) -> None:
        """Count an error that a client may meet, and try elsewhere. Raises NotServedError for any other."""
        if error.status == 500:
            self._tally.count(self._tally.unclear, f"{error.code}: {error.detail}")
        elif error.code in PASSING or error.status in (429, 503):
            self._tally.count(self._tally.retries, error.code)
        else:
            raise NotServedError(f"refused for good: {error}") from error
        self._at = (self._at + 1) % len(self._clients)
