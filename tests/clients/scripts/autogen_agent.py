"""AutoGen's assistant agent."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

model = OpenAIChatCompletionClient(
    model=os.environ.get("KVRECALL_MODEL", "reference"),
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
    model_info=ModelInfo(
        vision=False,
        function_calling=True,
        json_output=False,
        structured_output=False,
        family=ModelFamily.UNKNOWN,
    ),
)


async def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def new_agent(**options):
    return AssistantAgent("helper", model, tools=[get_weather], max_tool_iterations=5, **options)


async def ask(text: str) -> str:
    result = await new_agent().run(task=text)
    return result.messages[-1].content


# --8<-- [end:example]


async def stream(text):
    agent = new_agent(model_client_stream=True)
    events = [event async for event in agent.run_stream(task=text)]
    return "".join(
        event.content
        for event in events
        if getattr(event, "type", "") == "ModelClientStreamingChunkEvent"
    )


async def talk():
    agent = new_agent()
    for text in TURNS:
        result = await agent.run(task=text)
    return result.messages[-1].content


loop = asyncio.new_event_loop()


def wait(work):
    return loop.run_until_complete(work)


if __name__ == "__main__":
    run(
        plain=lambda: wait(ask(NAME)),
        streamed=lambda: wait(stream(NAME)),
        turns=lambda: wait(talk()),
        tools=lambda: wait(ask(WEATHER)),
        streamed_tools=lambda: wait(stream(WEATHER)),
    )
