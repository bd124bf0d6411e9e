"""OpenAI's Agents, unmodified: tools over responses, chains, conversations, and chat completions."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from kvrecall.protocol.v1 import worker_pb2 as pb

CALL = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Bern"}')
PLAIN = RunConfig(tracing_disabled=True)
WEATHER = "sunny in Bern"


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
async def client(served: Any) -> AsyncIterator[AsyncOpenAI]:
    url = str(served.http.base_url.join("/v1"))
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def build_agent(served: Any, model: Any) -> Agent[Any]:
    served.worker.script = [[CALL], "it is sunny", "yes"]
    return Agent("helper", instructions="be kind", tools=[get_weather], model=model)


async def count_turns(served: Any) -> list[int]:
    """The turns of each session."""
    ids = await served.catalog.sessions.get_ids()
    return [(await served.service.get(id))[0].turns for id in ids]


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_an_agent_calls_its_tool_and_goes_on_in_one_session(
    served: Any, client: AsyncOpenAI, kind: Any, streamed: bool
) -> None:
    agent = build_agent(served, kind(served.service.info.model, client))
    result: Any
    if streamed:
        result = Runner.run_streamed(agent, "weather in Bern?", run_config=PLAIN)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "weather in Bern?", run_config=PLAIN)
    assert result.final_output.strip() == "it is sunny"
    said = [*result.to_input_list(), {"role": "user", "content": "sure?"}]
    second = await Runner.run(agent, said, run_config=PLAIN)
    assert second.final_output == "yes"
    assert await count_turns(served) == [3], "nothing was said twice"
    (session,) = await served.catalog.sessions.get_ids()
    turns = await served.service.turns(session, 1, 1)
    assert [message.content for message in turns[0].messages] == [WEATHER]


async def test_an_agent_goes_on_from_its_last_response(served: Any, client: AsyncOpenAI) -> None:
    agent = build_agent(served, OpenAIResponsesModel(served.service.info.model, client))
    first = await Runner.run(
        agent, "weather in Bern?", run_config=PLAIN, auto_previous_response_id=True
    )
    assert first.final_output == "it is sunny"
    last = first.last_response_id
    second = await Runner.run(agent, "sure?", run_config=PLAIN, previous_response_id=last)
    assert second.final_output == "yes"
    assert await count_turns(served) == [3]


async def test_an_agent_answers_in_a_conversation(served: Any, client: AsyncOpenAI) -> None:
    agent = build_agent(served, OpenAIResponsesModel(served.service.info.model, client))
    id = (await client.conversations.create()).id
    for question, expected in (("weather in Bern?", "it is sunny"), ("sure?", "yes")):
        result = await Runner.run(agent, question, run_config=PLAIN, conversation_id=id)
        assert result.final_output == expected
    assert await count_turns(served) == [3]
    items = [item async for item in client.conversations.items.list(id, order="asc")]
    assert [item.type for item in items] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
        "message",
    ]


async def test_a_session_of_agents_keeps_its_items_in_a_conversation(
    served: Any, client: AsyncOpenAI
) -> None:
    agent = build_agent(served, OpenAIResponsesModel(served.service.info.model, client))
    session = OpenAIConversationsSession(openai_client=client)
    for question, expected in (("weather in Bern?", "it is sunny"), ("sure?", "yes")):
        result = await Runner.run(agent, question, run_config=PLAIN, session=session)
        assert result.final_output == expected
    assert await count_turns(served) == [3]
    assert len(await session.get_items()) == 6
    last: Any = await session.pop_item()
    assert last["content"][0]["text"] == "yes"
    assert len(await session.get_items()) == 5
    await session.clear_session()


async def test_settings_that_agents_send_by_habit_are_taken(
    served: Any, client: AsyncOpenAI
) -> None:
    settings = ModelSettings(
        temperature=0.5, max_tokens=20, store=False, metadata={"a": "b"}, truncation="auto"
    )
    model = OpenAIResponsesModel(served.service.info.model, client)
    agent = build_agent(served, model).clone(model_settings=settings)
    result = await Runner.run(agent, "weather in Bern?", run_config=PLAIN)
    assert result.final_output == "it is sunny"
    assert result.context_wrapper.usage.input_tokens_details.cached_tokens > 0
