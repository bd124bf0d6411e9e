"""Tenant ann: recorded conversations with seeded sampling; no other tenant may change an answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from benchmarks.fuzz.cleaning import delete_all
from benchmarks.fuzz.findings import Findings, Problem
from benchmarks.fuzz.replies import SECONDS
from faults.load.openai_api import read_text
from faults.load.scripts import get_chatter, get_question

Json = dict[str, Any]
DOOR = "neighbour"
SECRET = "The password of ann is wintergreen-{}."
APIS = ("chat", "responses", "sessions")
_TURNS = 3
_TRIES = 40


@dataclass(frozen=True)
class Conversation:
    """What ann says, turn by turn, through one API."""

    number: int
    api: str
    texts: tuple[str, ...]

    @property
    def sampling(self) -> Json:
        """Settings of its answers."""
        return {"temperature": 0.8, "seed": 1000 + self.number}


def build_conversations(seed: int, count: int) -> list[Conversation]:
    """Return `count` conversations, a function of the seed."""
    found = []
    for number in range(count):
        rng = Random(f"{seed} ann {number}")
        opening = f"{SECRET.format(number)} {get_chatter(rng, 12)}"
        later = [f"{get_chatter(rng, 3)} {get_question(rng)}" for _ in range(_TURNS - 1)]
        found.append(Conversation(number, APIS[number % len(APIS)], (opening, *later)))
    return found


class NotServedError(Exception):
    """A request of ann was refused, or not served in all its tries."""


class Neighbour:
    """Ann's client: she repeats what the service asks her to repeat."""

    def __init__(self, url: str, key: str, learn: Callable[[str], None] = lambda _: None) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=SECONDS)
        self._learn = learn
        self.repeats = 0

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def hold(self, conversation: Conversation) -> list[str]:
        """Hold a conversation from its beginning; returns its answers. Raises NotServedError."""
        return {"chat": self._chat, "responses": self._respond, "sessions": self._turn}[
            conversation.api
        ](conversation)

    def clean(self, findings: Findings) -> None:
        """Delete all sessions, so that ann's quota lasts for any number of conversations."""
        delete_all(self._client, findings)

    def _chat(self, conversation: Conversation) -> list[str]:
        messages: list[Json] = []
        for text in conversation.texts:
            messages.append({"role": "user", "content": text})
            body = {"model": "reference", "messages": messages, "max_tokens": 12}
            reply = self._post("/v1/chat/completions", body | conversation.sampling)
            messages.append({"role": "assistant", "content": _read_choice(reply)})
        return [each["content"] for each in messages if each["role"] == "assistant"]

    def _respond(self, conversation: Conversation) -> list[str]:
        answers, previous = [], None
        for text in conversation.texts:
            body = {"model": "reference", "input": text, "max_output_tokens": 12}
            more: Json = {} if previous is None else {"previous_response_id": previous}
            # Responses have no seed, so they are greedy.
            reply = self._post("/v1/responses", body | more | {"temperature": 0})
            previous = reply["id"]
            self._learn(previous)
            answers.append(read_text(reply["output"]))
        return answers

    def _turn(self, conversation: Conversation) -> list[str]:
        session = self._post("/v1/sessions", {"budget": 128, "seed": conversation.number})["id"]
        self._learn(session)
        answers = []
        for text in conversation.texts:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12}
            sampling = {**conversation.sampling, "wait_for_repairs": True}
            reply = self._post(f"/v1/sessions/{session}/turns", body | sampling)
            answers.append(str(reply["message"]["content"]))
        return answers

    def _post(self, path: str, body: Json) -> Json:
        """Send a request until it is served. Raises NotServedError."""
        key = f"ann-{time.monotonic_ns()}"
        for _ in range(_TRIES):
            try:
                reply = self._client.post(path, json=body, headers={"idempotency-key": key})
            except httpx.HTTPError as error:
                raise NotServedError(f"{path}: {error!r}") from error
            if reply.status_code < 400:
                found: Json = reply.json()
                return found
            if reply.status_code not in (409, 429, 503):
                break
            self.repeats += 1
            time.sleep(min(5.0, float(reply.headers.get("retry-after", 1))))
        raise NotServedError(f"{path}: {reply.status_code} {reply.text}")


def _read_choice(reply: Json) -> str:
    return reply["choices"][0]["message"]["content"] or ""


def compare(
    conversation: Conversation, answers: Sequence[str], undisturbed: Sequence[str]
) -> list[Problem]:
    """Return a problem for every answer that an undisturbed service has not given."""
    return [
        Problem(
            "an answer that an undisturbed service does not give",
            f"conversation {conversation.number} ({conversation.api}), turn {number + 1}: "
            f"{ours!r}, undisturbed {theirs!r}",
        )
        for number, (ours, theirs) in enumerate(zip(answers, undisturbed, strict=True))
        if ours != theirs
    ]


def talk(
    neighbour: Neighbour,
    conversations: Sequence[Conversation],
    undisturbed: Sequence[Sequence[str]],
    findings: Findings,
    go_on: Callable[[], bool],
) -> None:
    """Hold the conversations again and again, and compare their answers."""
    number = 0
    while go_on() or number < 1:
        at = number % len(conversations)
        number += 1
        try:
            answers = neighbour.hold(conversations[at])
        except NotServedError as error:
            findings.add(DOOR, Problem("ann is not served", str(error)))
            continue
        finally:
            neighbour.clean(findings)
        findings.count_other("conversations of the neighbour")
        findings.count_other("answers compared", len(answers))
        for problem in compare(conversations[at], answers, undisturbed[at]):
            findings.add(DOOR, problem)
    findings.count_other("requests that the neighbour repeated", neighbour.repeats)
