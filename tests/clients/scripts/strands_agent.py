"""Strands' agent."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(
    client_args={
        "base_url": os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
        "api_key": "any",
    },
    model_id=os.environ.get("KVRECALL_MODEL", "reference"),
)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def new_agent() -> Agent:
    return Agent(model=model, tools=[get_weather], callback_handler=None)


def ask(text: str) -> str:
    return str(new_agent()(text))


# --8<-- [end:example]


async def stream(text):
    events = new_agent().stream_async(text)
    return "".join([event["data"] async for event in events if "data" in event])


def turns():
    agent = new_agent()
    for text in TURNS:
        answer = agent(text)
    return str(answer)


if __name__ == "__main__":
    # Strands streams every answer: a plain one differs only in what its caller sees.
    run(
        plain=lambda: ask(NAME),
        streamed=lambda: asyncio.run(stream(NAME)),
        turns=turns,
        tools=lambda: ask(WEATHER),
        streamed_tools=lambda: asyncio.run(stream(WEATHER)),
    )
