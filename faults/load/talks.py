"""Talks: conversations through OpenAI's APIs, by clients that know of no session.

A client repeats what failed, with or without a key; it leaves streams, and edits earlier messages.
Whatever session or fork holds its conversation, the answers are those of an undisturbed service, and
the log of the last one's session is the conversation.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Literal, TypeVar

from faults.load.client import ANSWER_SECONDS, FaultClient
from faults.load.openai_api import (
    CHAT,
    CONVERSATIONS,
    MODELS,
    RESPONSES,
    Answer,
    Requester,
    TornStreamError,
    read_text,
)
from faults.load.scripts import LONG_SYSTEM, SYSTEM, get_chatter, get_question
from kvrecall.client import KvrecallError, StreamBroken
from kvrecall.domain.sessions.session import Turn

Json = dict[str, Any]
T = TypeVar("T")
Api = Literal["chat", "previous response", "conversation"]
APIS: tuple[Api, ...] = ("chat", "previous response", "conversation")
# Talks have a tenant of their own: its sessions, which no client deletes, are known by it.
TENANT = "talks"
_LEFT_AFTER = 3


class LeftError(Exception):
    """The client left a stream."""


@dataclass(frozen=True)
class Say:
    """What a user says next, and how it is sent.

    `back`: the number of answers that it takes back, as one who edits an earlier message does.
    `left`: it is a stream that the client leaves after its first events, before it is sent again.
    """

    text: str
    max_tokens: int
    stream: bool
    keyed: bool
    back: int = 0
    left: bool = False


@dataclass(frozen=True)
class TalkScript:
    """A talk. What it says from number `sleeps_at` on is said at the end of a round."""

    number: int
    api: Api
    says: tuple[Say, ...]
    sleeps_at: int


def talk_scripts(seed: int, count: int) -> list[TalkScript]:
    """`count` different talks, a function of the seed."""
    return [_script(Random(f"{seed} talk {number}"), number) for number in range(count)]


def _script(rng: Random, number: int) -> TalkScript:
    api = APIS[number % len(APIS)]
    says = [_say(rng, api, get_chatter(rng, 12))]
    for turn in range(1, rng.randrange(3, 6)):
        # The items of a conversation are what was said: none is removed.
        back = rng.randrange(1, turn + 1) if api != "conversation" and rng.random() < 0.3 else 0
        text = get_chatter(rng, rng.randrange(6, 16)) if turn % 2 else get_question(rng)
        says.append(_say(rng, api, text, back))
    awake = [_say(rng, api, get_question(rng)) for _ in range(2)]
    return TalkScript(number, api, (*says, *awake), len(says))


def _say(rng: Random, api: Api, text: str, back: int = 0) -> Say:
    # Without a key, a repeated request is appended to the conversation again.
    keyed = api == "conversation" or rng.random() < 0.5
    stream = rng.random() < 0.6
    return Say(text, rng.randrange(8, 20), stream, keyed, back, stream and rng.random() < 0.3)


@dataclass
class Talk:
    """The acknowledged part of a talk. `path`: numbers of what its last answer follows, and its own."""

    script: TalkScript
    name: str
    model: str = ""
    conversation: str = ""
    answers: list[Answer] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def system(self) -> str:
        """The system message, which sessions share."""
        return LONG_SYSTEM if self.script.number % 2 else SYSTEM

    def run(self, client: FaultClient, end: int | None = None, calm: bool = False) -> None:
        """Say what was not said, up to number `end`. Raises NotServedError.

        `calm`: no stream is left.
        """
        self._open(client)
        says = self.script.says
        for number in range(len(self.answers), len(says) if end is None else end):
            self.say(client, number, calm)

    def _open(self, client: FaultClient) -> None:
        if not self.model:
            self.model = self._retry(client, partial(_get, MODELS))["data"][0]["id"]
        if self.script.api == "conversation" and not self.conversation:
            created = self._retry(client, lambda each: each.send("POST", CONVERSATIONS, {}))
            self.conversation = created["id"]

    def say(
        self,
        client: FaultClient,
        number: int,
        calm: bool = False,
        heard: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Say one thing until it is answered. Raises NotServedError."""
        say = self.script.says[number]
        before = self.path[: len(self.path) - say.back]
        path, body = self._request(before, say)
        key = f"{self.name}-{number}" if say.keyed else None

        def ask(requester: Requester) -> Answer:
            try:
                return requester.answer(path, body, key, heard)
            except TornStreamError as error:
                client.counters.torn_streams.append(f"{self.name} {number}: {error}")
                raise StreamBroken from error

        if say.left and not calm:
            with suppress(KvrecallError, TornStreamError, LeftError):
                self._requester(client.url).answer(path, body, key, _leave)
        answer = self._retry(client, ask)
        if before and answer.match == "built":
            self.errors.append(f"{self.name} {number}: no session had the acknowledged answers")
        self.answers.append(answer)
        self.path = [*before, number]
        client.counters.count(client.counters.acknowledged, f"answer, {self.script.api}")
        client.counters.count(
            client.counters.other, f"answers in a session that was {answer.match}"
        )

    def find_differences(self, calm: "Talk", start: int = 0) -> list[str]:
        """The answers from number `start` on that differ from those of the undisturbed service."""
        pairs = list(zip(self.answers, calm.answers, strict=False))[start:]
        return [
            f"{self.name} {number}: {ours}, undisturbed {theirs}"
            for number, (ours, theirs) in enumerate(pairs, start)
            if _said(ours) != _said(theirs)
        ]

    def log_errors(self, log: Sequence[Turn]) -> list[str]:
        """Differences of the log of the last answer's session from the conversation."""
        logged = [
            message.content
            for turn in log
            for message in (*turn.messages, turn.outcome.message)
            if message is not None
        ]
        said = [self.system, *self._said()]
        return [] if logged == said else [f"{self.name}: said {said}, in the log {logged}"]

    def stored_errors(self, client: FaultClient) -> list[str]:
        """Stored responses and items that are not what was answered. Raises NotServedError."""
        errors = []
        if self.script.api == "previous response":
            for answer in self.answers:
                found = self._retry(client, partial(_get, f"{RESPONSES}/{answer.response}"))
                if read_text(found["output"]) != answer.text:
                    errors.append(f"{self.name}: {answer}, stored {found['output']}")
        if self.conversation:
            path = f"{CONVERSATIONS}/{self.conversation}/items?limit=100&order=asc"
            items = self._retry(client, partial(_get, path))["data"]
            texts = [read_text([item]) for item in items]
            if texts != self._said():
                errors.append(f"{self.name}: said {self._said()}, the conversation has {texts}")
        return errors

    def delete(self, client: FaultClient) -> None:
        """Delete its conversation; its sessions are deleted with their tenant's."""
        if not self.conversation:
            return

        def request(each: Requester) -> Json:
            try:
                return each.send("DELETE", f"{CONVERSATIONS}/{self.conversation}")
            except KvrecallError as error:
                if error.status == 404:
                    return {}  # by an earlier request that was not answered
                raise

        self._retry(client, request)

    def _said(self) -> list[str]:
        """What user and assistant said, in turn."""
        says = self.script.says
        return [text for n in self.path for text in (says[n].text, self.answers[n].text)]

    def _request(self, before: Sequence[int], say: Say) -> tuple[str, Json]:
        """Path and body of a request that goes on after the answers `before`."""
        settings = {"budget": 64, "research": {"repair_rows": 0}, "seed": self.script.number}
        body: Json = {
            "model": self.model,
            "stream": say.stream,
            "temperature": 0,
            "kvrecall": settings,
        }
        user = {"role": "user", "content": say.text}
        if self.script.api == "chat":
            messages: list[Json] = [{"role": "system", "content": self.system}]
            for number in before:
                messages += [
                    {"role": "user", "content": self.script.says[number].text},
                    {"role": "assistant", "content": self.answers[number].text},
                ]
            options = {"stream_options": {"include_usage": True}} if say.stream else {}
            return CHAT, body | options | {
                "messages": [*messages, user],
                "max_tokens": say.max_tokens,
            }
        body |= {
            "input": say.text,
            "instructions": self.system,
            "max_output_tokens": say.max_tokens,
        }
        if self.conversation:
            return RESPONSES, body | {"conversation": self.conversation}
        previous = {"previous_response_id": self.answers[before[-1]].response} if before else {}
        return RESPONSES, body | previous

    def _retry(self, client: FaultClient, request: Callable[[Requester], T]) -> T:
        return client.retry_at(lambda url: request(self._requester(url)))

    def _requester(self, url: str) -> Requester:
        return Requester(url, TENANT, ANSWER_SECONDS)


def _get(path: str, requester: Requester) -> Json:
    return requester.send("GET", path)


def _leave(number: int) -> None:
    """Leave a stream after its first events."""
    if number >= _LEFT_AFTER:
        raise LeftError


def _said(answer: Answer) -> tuple[str, str, int, int]:
    return answer.text, answer.ended, answer.prompt_tokens, answer.output_tokens
