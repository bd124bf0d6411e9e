"""OpenAI's own Python client: chat completions."""

import json

# --8<-- [start:example]
import os

from _case import NAME, OPTIONS, TURNS, WEATHER, run
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1", api_key="any"
)
model = client.models.list().data[0].id


def ask(messages, **options):
    """Send the whole conversation; what the session holds already is not computed again."""
    answer = client.chat.completions.create(model=model, messages=messages, **options)
    return answer.choices[0].message


def stream(messages, **options):
    chunks = client.chat.completions.create(model=model, messages=messages, stream=True, **options)
    for chunk in chunks:
        yield chunk.choices[0].delta.content or ""


# --8<-- [end:example]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def plain():
    return ask([{"role": "user", "content": NAME}], **OPTIONS).content


def streamed():
    return "".join(stream([{"role": "user", "content": NAME}], **OPTIONS))


def turns():
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        messages.append(ask(messages, **OPTIONS))
    return messages[-1].content


def tools():
    messages = [{"role": "user", "content": WEATHER}]
    while True:
        answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *(_result(call) for call in message.tool_calls)]


def streamed_tools():
    messages = [{"role": "user", "content": WEATHER}]
    while True:
        with client.chat.completions.stream(model=model, messages=messages, tools=[TOOL]) as events:
            for _ in events:
                pass
        message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *(_result(call) for call in message.tool_calls)]


def _result(call):
    city = json.loads(call.function.arguments)["city"]
    return {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"}


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
