"""OpenAI's Agents SDK over chat completions."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1", api_key="any"
)
model = OpenAIChatCompletionsModel(os.environ.get("KVRECALL_MODEL", "reference"), client)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = Agent(name="helper", model=model, tools=[get_weather])


async def ask(text: str) -> str:
    return (await Runner.run(agent, text)).final_output


# --8<-- [end:example]


async def stream(text):
    result = Runner.run_streamed(agent, text)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return "".join(pieces)


async def talk():
    said = []
    for text in TURNS:
        result = await Runner.run(agent, [*said, {"role": "user", "content": text}])
        said = result.to_input_list()
    return result.final_output


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
