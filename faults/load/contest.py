"""Sessions that two gateways write at once, with and without keys, and that are forked meanwhile.

The order of such a session's turns is not known before. Its log is: each turn that was acknowledged
is there once, with its reply, and each other turn that was sent at most once. An undisturbed
service to which the turns of the log are sent in this order gives the same replies.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random

from faults.load.client import FaultClient, NotServedError, is_transient
from faults.load.counters import Counters
from faults.load.scripts import LONG_SYSTEM, Json
from kvrecall.client import KvrecallClient, KvrecallError
from kvrecall.domain.sessions.session import Turn

WRITERS = 2
MAX_TURNS = 10
SETTINGS: Json = {"budget": 64, "research": {"repair_rows": 0}, "seed": 11}
QUESTION = "What is the code of door 3?"


@dataclass
class Contest:
    """One contended session and its forks. `sent` counts the requests with each text."""

    name: str
    counters: Counters
    session: str = ""
    forks: list[str] = field(default_factory=list)
    acknowledged: dict[str, Json] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, urls: Sequence[str], over: threading.Event) -> None:
        """Write the session with WRITERS threads until `over` or MAX_TURNS each."""
        opener = FaultClient(urls, self.counters, Random(f"{self.name} opener"))
        try:
            self.open(opener)
        finally:
            opener.close()
        writers = [
            threading.Thread(target=self._write, args=(urls, number, over))
            for number in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()

    def open(self, client: FaultClient) -> None:
        """Create the session and send its first turn. Raises NotServedError."""
        self.session = client.retry(lambda each: self.create(each))["id"]
        self.say(client, self.opening)

    def say(self, client: FaultClient, text: str) -> Json:
        """Send a turn with a key until it is acknowledged. Raises NotServedError."""
        key = f"{self.name}-{text}"[:100].strip()  # no header ends with a space
        answer = self._say(client, text, key)
        self._keep(answer, text)
        return answer

    def messages(self, text: str) -> list[Json]:
        """Messages of the turn with this text."""
        system = [{"role": "system", "content": LONG_SYSTEM}] if text == self.opening else []
        return [*system, {"role": "user", "content": text}]

    def log_errors(self, log: Sequence[Turn]) -> list[str]:
        """Differences of the session's log from what was acknowledged and sent."""
        return [*self.doubled_turns(log), *self.lost_turns(log)]

    def doubled_turns(self, log: Sequence[Turn]) -> list[str]:
        """Texts for the turns that are in the log more often than they may be."""
        counts = Counter(turn.messages[-1].content for turn in log)
        return [
            f"{self.name}: {text!r} is {counts[text]} times in the log, sent {self.sent[text]} times"
            for text in counts
            if counts[text] > (1 if text in self.acknowledged else self.sent[text])
        ]

    def lost_turns(self, log: Sequence[Turn]) -> list[str]:
        """Texts for the acknowledged turns that are not in the log with their reply."""
        texts = [turn.messages[-1].content for turn in log]
        errors = []
        for text, answer in self.acknowledged.items():
            number = answer["turn"]
            found = log[number - 1] if number <= len(log) else None
            reply = found and found.outcome.message and found.outcome.message.content
            if found is None or (texts[number - 1], reply) != (text, answer["message"]["content"]):
                errors.append(
                    f"{self.name}: turn {number}, acknowledged, is not in the log: {text!r}"
                )
        return errors

    def create(self, client: KvrecallClient) -> Json:
        """Create the session; returns it."""
        return asdict(client.create_session(**SETTINGS, key=f"{self.name}-create"))

    @property
    def opening(self) -> str:
        """Text of its first turn."""
        return f"Hello, this is {self.name}. The code of Ada's locker is 4711."

    def _write(self, urls: Sequence[str], writer: int, over: threading.Event) -> None:
        rng = Random(f"{self.name} {writer}")
        client = FaultClient(urls[writer % len(urls) :][:1], self.counters, rng)
        try:
            for number in range(MAX_TURNS):
                if over.wait(rng.uniform(0.0, 1.5)):
                    return
                text = f"Writer {writer} says {number}: the garage of Ben has code {rng.randrange(9999)}."
                if rng.random() < 0.3:
                    self._say_once(urls[writer % len(urls)], text)
                else:
                    self.say(client, text)
                if rng.random() < 0.15:
                    self._fork(client, f"{self.name}-{writer}-{number}-fork")
        except NotServedError as error:
            self.failures.append(f"{self.name}: {error}")
        finally:
            client.close()

    def _fork(self, client: FaultClient, key: str) -> None:
        """Fork the session at its last turn, while the other writer goes on."""
        self.forks.append(client.fork(self.session, key, queue=True)["id"])

    def _say(self, client: FaultClient, text: str, key: str) -> Json:
        self.sent[text] = 1  # a key makes all repetitions one request
        messages = self.messages(text)
        return client.retry(
            lambda client: asdict(
                client.turn(self.session, messages, max_tokens=12, queue=True, key=key)
            )
        )

    def _say_once(self, url: str, text: str) -> None:
        """A turn without a key, sent once: after a failure it may be in the log or not."""
        self.sent[text] = 1
        try:
            with KvrecallClient(url, 60.0) as client, self.counters.attempt(url):
                answer = client.turn(self.session, self.messages(text), max_tokens=12, queue=True)
            self._keep(asdict(answer), text)
        except KvrecallError as error:
            self.counters.count(self.counters.other, "turns without a key, outcome unknown")
            if not is_transient(error):
                self.failures.append(f"{self.name}: without a key: {error}")

    def _keep(self, answer: Json, text: str) -> None:
        self.acknowledged[text] = answer
        self.counters.count(self.counters.acknowledged, "turn of a contended session")


def replay(urls: Sequence[str], contest: Contest, log: Sequence[Turn], answer: Json) -> list[str]:
    """Send a log to an undisturbed service; the replies that differ from the log's.

    `answer` is that of the session to QUESTION, after the log.
    """
    client = FaultClient(urls, Counters(), Random(0), calm=True)
    name = f"replay {contest.name} {len(log)} {answer['turn']}"
    try:
        made = client.retry(lambda calm: asdict(calm.create_session(**SETTINGS)))
        errors = []
        texts = [turn.messages[-1].content for turn in log]
        replies = [turn.outcome.message and turn.outcome.message.content for turn in log]
        for text, reply in zip(
            [*texts, QUESTION], [*replies, answer["message"]["content"]], strict=True
        ):
            given = client.retry(partial(_say_calmly, made["id"], contest.messages(text)))
            if given["message"]["content"] != reply:
                errors.append(
                    f"{contest.name} turn {given['turn']}: {reply!r}, "
                    f"undisturbed {given['message']['content']!r}"
                )
        client.delete(made["id"], f"{name}-delete")
        return errors[:1]
    finally:
        client.close()


def _say_calmly(session: str, messages: list[Json], client: KvrecallClient) -> Json:
    return asdict(client.turn(session, messages, max_tokens=12))
