"""Anthropic's own Python client: messages, and its tool runner in a thread."""

# --8<-- [start:example]
import os

from _case import NAME, OPTIONS, TURNS, WEATHER, run
from anthropic import Anthropic, beta_tool

client = Anthropic(base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420"), api_key="any")
model = client.models.list().data[0].id


@beta_tool
def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: Name of a city.
    """
    return f"sunny in {city}"


def run_tools(text):
    """Answer with tools: the runner's requests say only what is new, in one session."""
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=500,
        messages=[{"role": "user", "content": text}],
        tools=[get_weather],
    )
    return runner.until_done().content[0].text


# --8<-- [end:example]


def ask(messages):
    return client.messages.create(
        model=model, max_tokens=500, messages=messages, extra_body=OPTIONS
    )


def plain():
    return ask([{"role": "user", "content": NAME}]).content[0].text


def streamed():
    messages = [{"role": "user", "content": NAME}]
    options = {"model": model, "max_tokens": 500, "messages": messages}
    with client.messages.stream(**options, extra_body=OPTIONS) as stream:
        return "".join(stream.text_stream)


def turns():
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        answer = ask(messages)
        messages.append({"role": "assistant", "content": answer.content})
    return answer.content[0].text


def tools():
    return run_tools(WEATHER)


def streamed_tools():
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=500,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[get_weather],
        stream=True,
    )
    for stream in runner:
        message = stream.get_final_message()
    return message.content[0].text


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
