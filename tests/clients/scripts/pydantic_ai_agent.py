"""pydantic-ai's agent over chat completions."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1", api_key="any"
)
agent = Agent(OpenAIChatModel(os.environ.get("KVRECALL_MODEL", "reference"), provider=provider))


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


async def ask(text: str) -> str:
    return (await agent.run(text)).output


# --8<-- [end:example]


async def stream(text):
    async with agent.run_stream(text) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


async def talk():
    history = None
    for text in TURNS:
        result = await agent.run(text, message_history=history)
        history = result.all_messages()
    return result.output


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
