"""smolagents' agent that calls tools."""

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(
    model_id=os.environ.get("KVRECALL_MODEL", "reference"),
    api_base=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


def ask(text: str) -> str:
    return ToolCallingAgent(tools=[get_weather], model=model).run(text)


# --8<-- [end:example]


def plain():
    return model([{"role": "user", "content": NAME}]).content


def streamed():
    chunks = model.generate_stream([{"role": "user", "content": NAME}])
    return "".join(chunk.content or "" for chunk in chunks)


def turns():
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
        answer = model(messages).content
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return answer


def tools():
    return ask(WEATHER)


def streamed_tools():
    agent = ToolCallingAgent(tools=[get_weather], model=model, stream_outputs=True)
    return agent.run(WEATHER)


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
