"""What a continued turn costs through OpenAI's API, beyond the session API's.

`python -m benchmarks.openai_turns` serves a bare FastAPI echo and the gateway over SQLite and over a
real Redis (over a worker that computes nothing), each in a process of its own. Conversations of 2,
50 and 500 messages of 1 KB go on with one message: through OpenAI's API, whose requests say all that
was said, and through the session API, whose requests say the new message. The echo gets the same
bodies: it parses the JSON and gives an answer of the same size. All four are measured in turns, so
that disturbances of the machine affect all alike.

A row is the time of one of them; the last of a condition is what OpenAI's API takes longer, less
what the echo takes longer for its larger body.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.front_door import ECHO, RESULTS, Subject, describe, served, served_gateways
from kvrecall.reporting.results import Row, build_results, speed_row

MESSAGES = (2, 50, 500)
MESSAGE_BYTES = 1000
OPENAI, SESSIONS = "OpenAI's API", "the session API"
WARM_TURNS = 5
# A conversation is used until it has a tenth more messages than it began with.
_GROWTH = 10

Json = dict[str, Any]


@dataclass
class Talk:
    """A conversation that is held through both APIs, in a session of each."""

    http: httpx.Client
    model: str
    rng: random.Random
    said: list[Json] = field(default_factory=list)
    session: str = ""

    def begin(self, messages: int) -> "Talk":
        """Tell both sessions a conversation that the next answer makes `messages` long."""
        for number in range(messages - 1):
            role = "assistant" if number % 2 else "user"
            self.said.append({"role": role, "content": self._words()})
        created = self.http.post("/v1/sessions", json={"seed": 1}).raise_for_status()
        self.session = str(created.json()["id"])
        for first in range(0, messages - 2, 50):
            recorded = {"messages": self.said[first : min(first + 50, messages - 2)]}
            self._post_turn(recorded | {"generate": False})
        self._post_turn({"messages": self.said[-1:], "max_tokens": 4})
        answer = post(self.http, "/v1/chat/completions", self._build_request())[1]
        self.said.append(_get_message(answer))
        return self

    def go_on(self, echo: httpx.Client) -> dict[str, float]:
        """Send one more message to both and to the echo; return the seconds of each."""
        self.said.append({"role": "user", "content": self._words()})
        whole = self._build_request()
        new = encode({"messages": self.said[-1:], "max_tokens": 4})
        seconds: dict[str, float] = {}
        turns = f"/v1/sessions/{self.session}/turns"
        seconds[SESSIONS] = post(self.http, turns, new)[0]
        seconds[OPENAI], answer = post(self.http, "/v1/chat/completions", whole)
        seconds[f"{ECHO}, {SESSIONS}"] = post(echo, "/v1/echo", new)[0]
        seconds[f"{ECHO}, {OPENAI}"] = post(echo, "/v1/echo", whole)[0]
        self.said.append(_get_message(answer))
        return seconds

    def _post_turn(self, body: Json) -> None:
        if body["messages"]:
            post(self.http, f"/v1/sessions/{self.session}/turns", encode(body))

    def _build_request(self) -> bytes:
        return encode({"model": self.model, "messages": self.said, "max_tokens": 4})

    def _words(self) -> str:
        return "".join(self.rng.choices("abcdefgh     ", k=MESSAGE_BYTES))


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=200, help="of each conversation's length")
    parser.add_argument("--out", type=Path, default=RESULTS / "openai-turns.json")
    given = parser.parse_args()
    rows = measure(given.turns, random.Random(given.seed))
    for row in rows:
        print(describe(row), flush=True)
    build_results("openai_turns", given.seed, "none", rows).write(given.out)


def measure(turns: int, rng: random.Random) -> list[Row]:
    """Rows of both catalogs and all lengths."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        here = Path(folder)
        echo = stack.enter_context(served(ECHO, "echo", here))
        subjects = stack.enter_context(served_gateways(here))
        floor = stack.enter_context(httpx.Client(base_url=echo.url, timeout=60))
        return [
            row
            for subject in subjects
            for messages in MESSAGES
            for row in build_rows(
                f"{subject.name}, {messages} messages",
                measure_length(subject, floor, messages, turns, rng),
            )
        ]


def measure_length(
    subject: Subject, echo: httpx.Client, messages: int, turns: int, rng: random.Random
) -> list[dict[str, float]]:
    """Seconds of turns that go on from about so many messages."""
    times: list[dict[str, float]] = []
    with httpx.Client(base_url=subject.url, timeout=60) as http:
        model = str(http.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        while len(times) < WARM_TURNS + turns:
            talk = Talk(http, model, rng).begin(messages)
            for _ in range(max(1, messages // _GROWTH // 2)):
                times.append(talk.go_on(echo))
    return times[WARM_TURNS:][:turns]


def build_rows(condition: str, times: Sequence[Mapping[str, float]]) -> list[Row]:
    """Rows of each request's seconds, and of what OpenAI's API takes longer."""
    rows = [
        speed_row(condition, name, "seconds", [each[name] for each in times]) for name in times[0]
    ]
    longer = [each[OPENAI] - each[SESSIONS] for each in times]
    body = [each[f"{ECHO}, {OPENAI}"] - each[f"{ECHO}, {SESSIONS}"] for each in times]
    beyond = [more - parsed for more, parsed in zip(longer, body, strict=True)]
    rows.append(speed_row(condition, f"{OPENAI} beyond {SESSIONS}", "seconds", longer))
    rows.append(speed_row(condition, f"the same, less {ECHO}'s", "seconds", beyond))
    return rows


def encode(body: Json) -> bytes:
    """A body as it is sent."""
    return json.dumps(body).encode()


def post(http: httpx.Client, path: str, body: bytes) -> tuple[float, Json]:
    """Send a body; return the seconds of the request, and its answer."""
    started = time.perf_counter()
    response = http.post(path, content=body, headers={"Content-Type": "application/json"})
    seconds = time.perf_counter() - started
    answer: Json = response.raise_for_status().json()
    return seconds, answer


def _get_message(answer: Json) -> Json:
    message = answer["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


if __name__ == "__main__":
    main()
