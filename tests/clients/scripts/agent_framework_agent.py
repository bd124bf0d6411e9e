"""Microsoft's Agent Framework over chat completions."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(
    model=os.environ.get("KVRECALL_MODEL", "reference"),
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = Agent(client, name="helper", tools=[get_weather])


async def ask(text: str) -> str:
    return (await agent.run(text)).text


# --8<-- [end:example]


async def stream(text):
    return "".join([piece.text async for piece in agent.run(text, stream=True)])


async def talk():
    session = agent.create_session()
    for text in TURNS:
        answer = await agent.run(text, session=session)
    return answer.text


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
