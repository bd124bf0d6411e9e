"""One conversation through every API of stateless clients is the same session."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.anthropic.schemas import MessagesBody
from gateway.openai.schemas import ChatCompletionBody
from kvrecall.domain.limits import ServiceLimits
from services.conversations.histories import build_history

Json = dict[str, Any]
TEXTS = st.text(max_size=6)
PARTS = st.lists(TEXTS, min_size=1, max_size=3)
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), st.integers() | TEXTS, max_size=2)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3)
TOOL = {"name": "f", "description": "Does.", "parameters": {"type": "object", "properties": {}}}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Json], list[Json], str]:
    """The messages of one conversation in OpenAI's and in Anthropic's form, and a system prompt."""
    system = draw(TEXTS)
    chat: list[Json] = [{"role": "system", "content": system}] if system else []
    messages: list[Json] = []
    for number in range(draw(st.integers(1, 4))):
        texts = draw(PARTS)
        chat.append({"role": "user", "content": "".join(texts)})
        messages.append({"role": "user", "content": [_text(text) for text in texts]})
        said = draw(TEXTS)
        calls = draw(st.just([]) | CALLS)
        ids = [f"c{number}-{index}" for index in range(len(calls))]
        pairs = list(zip(ids, calls, strict=True))
        chat.append(_chat_reply(said, pairs, draw))
        messages.append({"role": "assistant", "content": _blocks(said, pairs, draw)})
        results = draw(st.permutations([(id, draw(TEXTS)) for id in ids]))
        chat += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
        if results:
            messages.append({"role": "user", "content": [_result(*each) for each in results]})
    chat.append({"role": "user", "content": "?"})
    messages.append({"role": "user", "content": "?"})
    return chat, messages, system


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _result(id: str, text: str) -> Json:
    content: Any = [_text(text)] if len(text) % 2 else text
    return {"type": "tool_result", "tool_use_id": f"toolu_{id}", "content": content}


def _chat_reply(said: str, calls: list[Any], draw: st.DrawFn) -> Json:
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    functions = [
        {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, separators=separators)},
        }
        for id, (name, arguments) in calls
    ]
    message: Json = {"role": "assistant", "content": said or draw(st.sampled_from([None, ""]))}
    return message | ({"tool_calls": functions} if functions else {})


def _blocks(said: str, calls: list[Any], draw: st.DrawFn) -> list[Json]:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    blocks = [thought] if draw(st.booleans()) else []
    blocks += [_text(said)] if said else []
    return blocks + [
        {"type": "tool_use", "id": f"toolu_{id}", "name": name, "input": arguments}
        for id, (name, arguments) in calls
    ]


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_a_conversation_has_the_same_digests_through_chat_and_messages(
    conversation: tuple[list[Json], list[Json], str],
) -> None:
    chat, messages, system = conversation
    first = ChatCompletionBody.model_validate(
        {"model": "m", "messages": chat, "tools": [{"type": "function", "function": TOOL}]}
    )
    tool = {"name": "f", "description": "Does.", "input_schema": TOOL["parameters"]}
    second = MessagesBody.model_validate(
        {"model": "m", "max_tokens": 1, "messages": messages, "system": system, "tools": [tool]}
    )
    placed = [each.message for each in second.messages_to_domain(ServiceLimits())]
    digests = build_history(b"", first.messages_to_domain(ServiceLimits())).digests
    assert build_history(b"", placed).digests == digests
    ours, theirs = first.settings_to_domain("ann", ()), second.settings_to_domain("ann", ())
    assert [json.loads(tool) for tool in ours.tools] == [json.loads(tool) for tool in theirs.tools]
    assert replace(ours, tools=()) == replace(theirs, tools=())


async def test_a_conversation_goes_on_through_the_other_api(api: Any) -> None:
    api.worker.script = ["one", "two", "three"]
    model = api.service.info.model
    said: list[Json] = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": TOOL}]
    tool = {"input_schema": TOOL["parameters"], "description": "Does.", "name": "f"}
    chat = {"model": model, "messages": said, "tools": tools}
    first = await api.http.post("/v1/chat/completions", json=chat)
    said += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}]
    body = {"model": model, "max_tokens": 9, "messages": said, "tools": [tool]}
    second = await api.http.post("/v1/messages", json=body)
    said += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "c"}]
    third = await api.http.post("/v1/chat/completions", json=chat)
    assert [each.headers["kvrecall-match"] for each in (second, third)] == ["continued"] * 2
    assert third.headers["kvrecall-session"] == first.headers["kvrecall-session"]
