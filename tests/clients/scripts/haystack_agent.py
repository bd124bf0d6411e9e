"""Haystack's agent and chat generator."""

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


generator = OpenAIChatGenerator(
    model=os.environ.get("KVRECALL_MODEL", "reference"),
    api_base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key=Secret.from_token("any"),
)
agent = Agent(chat_generator=generator, tools=[get_weather])


def ask(text: str) -> str:
    answer = agent.run(messages=[ChatMessage.from_user(text)])
    return answer["messages"][-1].text


# --8<-- [end:example]


def plain():
    return generator.run([ChatMessage.from_user(NAME)])["replies"][0].text


def streamed():
    pieces = []
    generator.run(
        [ChatMessage.from_user(NAME)],
        streaming_callback=lambda chunk: pieces.append(chunk.content or ""),
    )
    return "".join(pieces)


def turns():
    messages = []
    for text in TURNS:
        messages.append(ChatMessage.from_user(text))
        messages += generator.run(messages)["replies"]
    return messages[-1].text


def tools():
    return ask(WEATHER)


def streamed_tools():
    pieces = []
    agent.run(
        messages=[ChatMessage.from_user(WEATHER)],
        streaming_callback=lambda chunk: pieces.append(chunk.content or ""),
    )
    return "".join(pieces)


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
