"""Agno's agent."""

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def new_agent(**options) -> Agent:
    model = OpenAILike(
        id=os.environ.get("KVRECALL_MODEL", "reference"),
        base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
        api_key="any",
    )
    return Agent(model=model, tools=[get_weather], telemetry=False, **options)


def ask(text: str) -> str:
    return new_agent().run(text).content


# --8<-- [end:example]


def stream(text):
    pieces = new_agent().run(text, stream=True)
    return "".join(piece.content or "" for piece in pieces if piece.event == "RunContent")


def turns():
    agent = new_agent()
    messages = []
    for text in TURNS:
        answer = agent.run([*messages, {"role": "user", "content": text}])
        messages = answer.messages
    return answer.content


if __name__ == "__main__":
    run(
        plain=lambda: ask(NAME),
        streamed=lambda: stream(NAME),
        turns=turns,
        tools=lambda: ask(WEATHER),
        streamed_tools=lambda: stream(WEATHER),
    )
