"""Histories that a model reads differently are never answered over each other's rows."""

import json
from typing import Any
from uuid import uuid4

import pytest

from tests.adversary.conftest import Tenant
from tests.adversary.test_text import call

Messages = list[dict[str, Any]]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}


def after_call(arguments: str) -> Messages:
    """A history with a call with these arguments."""
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    return after_answer({"role": "assistant", "content": "done"}, call(arguments), result)


def after_answer(answer: dict[str, Any], *before: dict[str, Any]) -> Messages:
    """A history with this answer."""
    first, last = {"role": "user", "content": "TAG do it"}, {"role": "user", "content": "next?"}
    return [first, *before, answer, last]


def says(text: str) -> dict[str, Any]:
    """An answer of this text."""
    return {"role": "assistant", "content": text}


DIFFERENT = {
    "numbers beyond all": (after_call('{"x":1e400}'), after_call('{"x":2e400}')),
    "an infinite number": (after_call('{"x":1e400}'), after_call('{"x":Infinity}')),
    "numbers beyond 2^53": (
        after_call('{"x":9007199254740993.0}'),
        after_call('{"x":9007199254740992.0}'),
    ),
    "a key that is there twice": (after_call('{"x":1,"x":2}'), after_call('{"x":2}')),
    "indentation of code": (after_answer(says("    return 1")), after_answer(says("return 1"))),
    "a message of the user": (
        after_answer(says("done")),
        [{"role": "user", "content": "TAG do it "}, *after_answer(says("done"))[1:]],
    ),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_a_history_that_differs_is_not_continued(
    mallory: Tenant, pair: tuple[Messages, Messages]
) -> None:
    """Unless the model reads the same text: then the prompts have the same number of tokens."""
    tag = uuid4().hex[:8]
    first, second = (json.loads(json.dumps(each).replace("TAG", tag)) for each in pair)
    assert mallory.ask(first, tools=[TOOL], max_tokens=2).status_code == 200
    reply = mallory.ask(second, tools=[TOOL], max_tokens=2)
    assert reply.status_code in (200, 400), reply.text
    assert reply.headers.get("kvrecall-match") != "continued"


def test_the_same_history_is_continued_whatever_the_spaces_in_its_arguments(
    mallory: Tenant,
) -> None:
    """So the test above can fail: clients write arguments anew."""
    tag = uuid4().hex[:8]
    question = [{"role": "user", "content": f"{tag} do it" + " and say why" * 150}]
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    seen = []
    for arguments in ('{"x":1,"y":[2]}', '{ "x": 1, "y": [2] }'):
        history = [*question, call(arguments), result]
        seen.append(mallory.ask(history, tools=[TOOL], max_tokens=2))
    first, second = seen
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first.headers["kvrecall-match"], second.headers["kvrecall-match"]) == (
        "built",
        "forked",
    )
    assert cached > 0.8 * second.json()["usage"]["prompt_tokens"]


def test_tools_in_another_order_are_another_prompt(mallory: Tenant) -> None:
    tag = uuid4().hex[:8]
    history = [{"role": "user", "content": f"{tag} do it"}]
    said = mallory.ask(history, tools=[TOOL, OTHER], max_tokens=2)
    answer = said.json()["choices"][0]["message"]["content"]
    more = [*history, says(answer), {"role": "user", "content": "next?"}]
    reply = mallory.ask(more, tools=[OTHER, TOOL], max_tokens=2)
    assert reply.status_code == 200
    assert reply.headers["kvrecall-session"] != said.headers["kvrecall-session"]
