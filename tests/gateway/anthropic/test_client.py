"""Anthropic's own client, unmodified, against a served application."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError, beta_async_tool
from anthropic.types import ToolUseBlock

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing import StubWorker

ASKED: list[str] = []


@beta_async_tool
async def look_up(name: str) -> str:
    """Look a name up.

    Args:
        name: The name.
    """
    ASKED.append(name)
    if name == "Ben":
        raise ValueError("no such name")
    return f"{name} has 4711"


def call(number: int, name: str) -> list[pb.ToolCall]:
    return [pb.ToolCall(id=f"c{number}", name="look_up", arguments=f'{{"name": "{name}"}}')]


def text_of(message: Any) -> str:
    """The text of a message's first block."""
    text: str = message.content[0].text
    return text


@pytest.fixture
async def client(served: Any) -> AsyncIterator[AsyncAnthropic]:
    base = str(served.http.base_url)
    async with AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(served: Any) -> dict[str, Any]:
    return {"model": served.service.info.model, "max_tokens": 50}


async def test_a_conversation_of_many_turns_goes_on_in_one_session(
    served: Any, client: AsyncAnthropic, ask: dict[str, Any]
) -> None:
    served.worker.script = [f"answer {number}" for number in range(12)]
    messages: list[Any] = []
    for number in range(12):
        messages.append({"role": "user", "content": f"question {number}"})
        raw = await client.messages.with_raw_response.create(messages=messages, **ask)
        answer = await raw.parse()
        assert text_of(answer) == f"answer {number}"
        assert raw.headers["kvrecall-match"] == ("continued" if number else "built")
        assert raw.headers["kvrecall-turn"] == str(number + 1)
        assert answer._request_id == raw.headers["x-request-id"]
        usage = answer.usage
        assert usage.cache_read_input_tokens == 5 * number, "a role, two words, two of the answer"
        assert usage.input_tokens == 4
        messages.append({"role": "assistant", "content": answer.content})


async def test_a_stream_becomes_the_same_message(
    served: Any, client: AsyncAnthropic, ask: dict[str, Any]
) -> None:
    served.worker.script = ["one two", call(1, "Ada")]
    hello: Any = [{"role": "user", "content": "hello"}]
    async with client.messages.stream(messages=hello, **ask) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text.strip() == "one two"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 2)
    tools = [look_up.to_dict()]
    async with client.messages.stream(messages=hello, tools=tools, **ask) as stream:
        message = await stream.get_final_message()
    (block,) = message.content
    assert isinstance(block, ToolUseBlock)
    assert (message.stop_reason, block.input) == ("tool_use", {"name": "Ada"})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_runs_tools_in_a_thread_until_there_is_an_answer(
    served: Any, client: AsyncAnthropic, ask: dict[str, Any], stream: bool
) -> None:
    ASKED.clear()
    served.worker.script = [call(1, "Ada"), call(2, "Ben"), "Ada has 4711"]
    runner = client.beta.messages.tool_runner(
        messages=[{"role": "user", "content": "which number"}],
        tools=[look_up],
        stream=stream,
        **ask,
    )
    last = await runner.until_done()
    assert text_of(last).strip() == "Ada has 4711"
    assert ASKED == ["Ada", "Ben"]
    (session,) = await served.catalog.sessions.get_ids()
    turns = await served.service.turns(session, 0, 9)
    said = [message.content for turn in turns for message in turn.messages]
    assert (said[0], said[1]) == ("which number", "Ada has 4711")
    assert "no such name" in said[2], "a failed call"
    assert len(said) == 3, "each request said only what was new"


async def test_a_thread_whose_session_is_gone_is_said_again_by_the_client(
    served: Any, client: AsyncAnthropic, ask: dict[str, Any]
) -> None:
    served.worker.script = ["one", "two"]
    thread = client.beta.messages.thread(**ask)
    await thread.send({"role": "user", "content": "a"})
    (session,) = await served.catalog.sessions.get_ids()
    await served.service.delete(session)
    answer = await thread.send({"role": "user", "content": "b"})
    assert text_of(answer) == "two"
    (session,) = await served.catalog.sessions.get_ids()
    assert (await served.service.get(session))[0].turns == 2, "the whole conversation again"


async def test_errors_are_raised_as_the_client_knows_them(
    client: AsyncAnthropic, ask: dict[str, Any]
) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(NotFoundError) as missing:
        await client.messages.create(messages=hello, **{**ask, "model": "claude-9"})
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(BadRequestError) as refused:
        await client.messages.create(messages=hello, extra_body={"temperature": 3}, **ask)
    assert str(refused.value.api_message).startswith("temperature: ")


async def test_tokens_are_counted(served: Any, client: AsyncAnthropic, ask: dict[str, Any]) -> None:
    assert isinstance(served.worker, StubWorker)
    hello: Any = [{"role": "user", "content": "hello there"}]
    counted = await client.messages.count_tokens(model=ask["model"], messages=hello)
    assert counted.input_tokens == 3
