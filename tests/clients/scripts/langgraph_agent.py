"""LangChain's chat model and a LangGraph agent."""

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
    model=os.environ.get("KVRECALL_MODEL", "reference"),
)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = create_agent(model, tools=[get_weather])


def ask(text: str) -> str:
    answer = agent.invoke({"messages": [{"role": "user", "content": text}]})
    return answer["messages"][-1].text


# --8<-- [end:example]


def plain():
    return model.invoke(NAME).text


def streamed():
    return "".join(chunk.text for chunk in model.stream(NAME))


def turns():
    messages = []
    for text in TURNS:
        messages = agent.invoke({"messages": [*messages, {"role": "user", "content": text}]})[
            "messages"
        ]
    return messages[-1].text


def tools():
    return ask(WEATHER)


def streamed_tools():
    asked = {"messages": [{"role": "user", "content": WEATHER}]}
    pieces = [
        piece.text
        for piece, _ in agent.stream(asked, stream_mode="messages")
        if piece.type == "AIMessageChunk"
    ]
    return "".join(pieces)


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
