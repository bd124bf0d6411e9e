"""One conversation through chat completions and responses: the same digests, the same session."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.conversation.ignored import IgnoredParts, Tolerance
from gateway.openai.responses.items import parse_item, read_turn, to_messages
from gateway.openai.responses.schemas import ResponseBody
from gateway.openai.responses.tools import Toolbox
from gateway.openai.schemas import ChatCompletionBody
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Turn
from services.conversations.histories import begin, build_history

Json = dict[str, Any]
PATH = "/v1/chat/completions"
WORDS = st.text(alphabet="ab é\n", min_size=1, max_size=6).filter(str.strip)
TOLERANCE = Tolerance(True, IgnoredParts())
ARGUMENTS = st.dictionaries(st.sampled_from("xy"), st.integers(0, 9), max_size=2)


@st.composite
def chats(draw: st.DrawFn) -> list[Json]:
    """A history of chat completions: questions, answers, calls and their results."""
    said: list[Json] = []
    for exchange in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "system", "developer"]))
        said.append({"role": role, "content": draw(WORDS)})
        answer: Json = {"role": "assistant", "content": draw(st.none() | WORDS)}
        calls = [
            {"name": f"f{draw(st.integers(0, 1))}", "arguments": json.dumps(draw(ARGUMENTS))}
            for _ in range(draw(st.integers(0, 2)))
        ]
        if calls:
            ids = [f"c{exchange}{number}" for number in range(len(calls))]
            answer["tool_calls"] = [
                {"id": id, "type": "function", "function": call}
                for id, call in zip(ids, calls, strict=True)
            ]
            results = [{"role": "tool", "tool_call_id": id, "content": draw(WORDS)} for id in ids]
            said += [answer, *results]
        elif answer["content"] is not None:
            said.append(answer)
    said.append({"role": "user", "content": draw(WORDS)})
    return said


def to_items(message: Json, draw: Any) -> list[Json]:
    """The items of a message in the clothes of some client."""
    role, content = message["role"], message["content"]
    if role == "tool":
        output = draw(st.sampled_from([content, [{"type": "input_text", "text": content}]]))
        call = message["tool_call_id"]
        return [{"type": "function_call_output", "call_id": call, "output": output}]
    items: list[Json] = []
    if role == "assistant" and draw(st.booleans()):
        items.append({"type": "reasoning", "id": "rs_1", "summary": []})
    if content is not None:
        kind = "output_text" if role == "assistant" else "input_text"
        cut = draw(st.integers(0, len(content)))
        parts = [{"type": kind, "text": text} for text in (content[:cut], content[cut:])]
        item = {"role": role, "content": draw(st.sampled_from([content, parts]))}
        items.append(item | draw(st.sampled_from([{}, {"type": "message", "status": "completed"}])))
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        name = call["function"]["name"]
        items.append(
            {"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments}
        )
    return items


def digest(messages: tuple[Message, ...]) -> list[bytes]:
    return list(build_history(begin(b""), messages).digests)


@settings(max_examples=200, deadline=None)
@given(said=chats(), data=st.data())
def test_messages_and_their_items_have_the_same_digests(said: list[Json], data: Any) -> None:
    chat = ChatCompletionBody.model_validate({"model": "m", "messages": said})
    items = [item for message in said for item in to_items(message, data.draw)]
    placed = [parse_item(item, f"input[{index}]", TOLERANCE) for index, item in enumerate(items)]
    assert digest(to_messages(placed).messages) == digest(chat.messages_to_domain(ServiceLimits()))


@settings(max_examples=100, deadline=None)
@given(said=chats())
def test_what_is_read_from_a_turn_log_says_the_same_again(said: list[Json]) -> None:
    chat = ChatCompletionBody.model_validate({"model": "m", "messages": said})
    messages = chat.messages_to_domain(ServiceLimits())
    reply = Message("assistant", "answer")
    outcome = TurnOutcome("s_1", 1, reply, "stop", 1, 1, MemoryReport(), (), {})
    items = read_turn(Turn("s_1", 1, messages, (), outcome), Toolbox({}), None)
    assert len({item["id"] for item in items}) == len(items)
    again = to_messages([parse_item(item, "input", TOLERANCE) for item in items]).messages
    assert digest(again) == digest((*messages, reply))


def test_tools_of_both_forms_are_the_same_tools() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    nested = {"type": "function", "function": function}
    chat = ChatCompletionBody.model_validate(
        {"model": "m", "messages": [], "tools": [nested]}
        | {"messages": [{"role": "user", "content": "a"}]}
    )
    response = ResponseBody.model_validate(
        {"model": "m", "input": "a", "tools": [{"type": "function", **function}]}
    )
    assert chat.settings_to_domain("", ()) == response.settings_to_domain("", ())


async def test_a_conversation_changes_its_api_and_stays_in_its_session(api, ask) -> None:
    api.worker.script = ["one", "two", "three", "four"]
    first = await ask("hello", instructions="be kind")
    said = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
    ]
    body = {"model": api.service.info.model, "messages": said}
    second = await api.http.post(PATH, json=body)
    assert second.headers["kvrecall-match"] == "continued"
    said += [second.json()["choices"][0]["message"], {"role": "user", "content": "and"}]
    third = await ask([{**each, "refusal": None} for each in said])
    assert third.headers["kvrecall-match"] == "continued"
    session = first.headers["kvrecall-session"]
    assert {second.headers["kvrecall-session"], third.headers["kvrecall-session"]} == {session}
    fourth = await ask("again", instructions="be kind", previous_response_id=first.json()["id"])
    assert fourth.headers["kvrecall-match"] == "forked"
