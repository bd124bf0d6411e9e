"""LlamaIndex' function agent over its client for servers like OpenAI's."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=os.environ.get("KVRECALL_MODEL", "reference"),
    api_base=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
    is_chat_model=True,
    is_function_calling_model=True,
)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = FunctionAgent(llm=model, tools=[get_weather])


async def ask(text: str) -> str:
    return str(await agent.run(text))


# --8<-- [end:example]


async def stream(text):
    handler = agent.run(text)
    pieces = [event.delta async for event in handler.stream_events() if hasattr(event, "delta")]
    await handler
    return "".join(pieces)


async def talk():
    memory = ChatMemoryBuffer.from_defaults()
    for text in TURNS:
        answer = str(await agent.run(text, memory=memory))
    return answer


if __name__ == "__main__":
    run(
        plain=lambda: asyncio.run(ask(NAME)),
        streamed=lambda: asyncio.run(stream(NAME)),
        turns=lambda: asyncio.run(talk()),
        tools=lambda: asyncio.run(ask(WEATHER)),
        streamed_tools=lambda: asyncio.run(stream(WEATHER)),
    )
