"""Agents' requests that begin as others did: what is cached is their common prefix, to a page.

A clock in the system prompt, one tool more, an edited message, messages that are left out: no session
holds such a history, but some begin with the same tokens.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import httpx
import pytest

Json = dict[str, Any]
PAGE = 64
ANSWER = 4


@pytest.fixture(scope="module")
def http(shared_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url, timeout=600) as client:
        yield client


def make_tool(name: str, text: str) -> Json:
    """A tool of an agent."""
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {}}}


class Agent:
    """An agent's requests to one server, and the tokens that they have in common."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._model = http.get("/v1/models").json()["data"][0]["id"]

    def ask(self, messages: list[Json], tools: list[Json], **options: Any) -> Json:
        """Send a whole conversation; returns its usage."""
        usage: Json = self.complete(messages, tools, **options)["usage"]
        return usage

    def complete(self, messages: list[Json], tools: list[Json], **options: Any) -> Json:
        """Send a whole conversation; returns the response."""
        body = {"messages": messages, "tools": tools, "max_tokens": ANSWER, "model": self._model}
        response = self._http.post("/v1/chat/completions", json=body | options)
        assert response.status_code == 200, response.text
        found: Json = response.json()
        return found

    def count_common(self, one: tuple[list[Json], list[Json]], other: Any) -> int:
        """Count the first tokens that two prompts have in common."""
        prompts = [self._tokenize(*each) for each in (one, other)]
        pairs = zip(*prompts, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _tokenize(self, messages: list[Json], tools: list[Json]) -> list[int]:
        body = {"messages": messages, "tools": tools, "model": self._model}
        tokens: list[int] = self._http.post("/tokenize", json=body).json()["tokens"]
        return tokens


@pytest.fixture(scope="module")
def agent(http: httpx.Client) -> Agent:
    return Agent(http)


def get_cached(usage: Json) -> int:
    """The tokens of a prompt that were not computed."""
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def make_conversation(say: Any, seed: int, turns: int) -> list[Json]:
    """A system prompt of some hundred tokens, questions and answers, and a last question."""
    messages = [{"role": "system", "content": say.chatter(seed, 30) + " The time is 12:00."}]
    for turn in range(turns):
        messages.append(say.user(say.chatter(seed + turn + 1, 6)))
        messages.append({"role": "assistant", "content": say.chatter(seed + turn + 50, 6)})
    return [*messages, say.user("What is the code of Ada's locker?")]


TOOLS = [make_tool("look_up", "Look up a code."), make_tool("call", "Call a person.")]


def change_clock(messages: list[Json], tools: list[Json]) -> tuple[list[Json], list[Json]]:
    system = messages[0]["content"].replace("12:00", "17:45")
    return [{"role": "system", "content": system}, *messages[1:]], tools


def add_tool(messages: list[Json], tools: list[Json]) -> tuple[list[Json], list[Json]]:
    return messages, [*tools, make_tool("write", "Write a letter to a person.")]


def edit_message(messages: list[Json], tools: list[Json]) -> tuple[list[Json], list[Json]]:
    edited = {**messages[1], "content": messages[1]["content"] + " Please be brief."}
    return [messages[0], edited, *messages[2:]], tools


def drop_beginning(messages: list[Json], tools: list[Json]) -> tuple[list[Json], list[Json]]:
    return [messages[0], *messages[3:]], tools


@pytest.mark.parametrize(
    ("number", "change"),
    list(enumerate([change_clock, add_tool, edit_message, drop_beginning])),
    ids=["clock", "tool", "edit", "window"],
)
def test_what_precedes_a_change_is_cached_to_a_page(
    agent: Agent, say: Any, number: int, change: Any
) -> None:
    before = (make_conversation(say, 1000 * (number + 1), 6), TOOLS)
    assert get_cached(agent.ask(*before)) < PAGE, "nothing began like this"
    after = change(*before)
    common = agent.count_common(before, after)
    assert common > 5 * PAGE
    usage = agent.ask(*after)
    assert common - PAGE < get_cached(usage) <= common
    again = agent.ask(*after)
    assert again["prompt_tokens"] - get_cached(again) <= 2 * PAGE


def test_ten_turns_with_a_clock_in_the_prompt_compute_their_news_alone(
    agent: Agent, say: Any
) -> None:
    messages = make_conversation(say, 9000, 4)
    agent.ask(messages, TOOLS)
    for minute in range(10):
        system = messages[0]["content"].replace("12:00", f"12:{minute:02}")
        now = [{"role": "system", "content": system}, *messages[1:]]
        common = agent.count_common((messages, TOOLS), (now, TOOLS))
        cached = get_cached(agent.ask(now, TOOLS))
        assert cached > min(common, 10 * PAGE) - PAGE


def test_the_answer_is_that_of_a_session_alone(agent: Agent, say: Any) -> None:
    messages = make_conversation(say, 12_000, 4)
    agent.ask(messages, TOOLS)
    edited, _ = edit_message(messages, TOOLS)
    options = {"max_tokens": 16, "temperature": 0}
    shared = agent.complete(edited, TOOLS, **options)
    alone = agent.complete(edited, TOOLS, cache_salt="alone", **options)
    assert shared["choices"][0]["message"] == alone["choices"][0]["message"]
    assert get_cached(shared["usage"]) > get_cached(alone["usage"]) == 0


def test_a_second_conversation_of_an_agent_has_all_but_its_own_words_cached(
    agent: Agent, say: Any
) -> None:
    system = {"role": "system", "content": say.chatter(31_000, 700)}
    tools = [make_tool(f"tool_{n}", say.chatter(32_000 + n, 4)) for n in range(12)]
    first = agent.ask([system, say.user("My name is Ada.")], tools)
    assert first["prompt_tokens"] > 10_000
    second = agent.ask([system, say.user("What is the code of Ben's garage?")], tools)
    assert get_cached(second) >= 0.99 * second["prompt_tokens"]
