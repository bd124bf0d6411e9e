"""LiteLLM's completion function."""

import json

# --8<-- [start:example]
import os

import litellm
from _case import NAME, OPTIONS, TURNS, WEATHER, run

SERVER = {
    "model": "openai/" + os.environ.get("KVRECALL_MODEL", "reference"),
    "api_base": os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    "api_key": "any",
}


def ask(messages, **options):
    answer = litellm.completion(messages=messages, **SERVER, **options)
    return answer.choices[0].message


# --8<-- [end:example]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def plain():
    return ask([{"role": "user", "content": NAME}], **OPTIONS).content


def streamed():
    messages = [{"role": "user", "content": NAME}]
    chunks = litellm.completion(messages=messages, stream=True, **SERVER, **OPTIONS)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def turns():
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        messages.append(ask(messages, **OPTIONS).model_dump())
    return messages[-1]["content"]


def tools():
    messages = [{"role": "user", "content": WEATHER}]
    while (message := ask(messages, tools=[TOOL])).tool_calls:
        messages += [message, *(_result(call) for call in message.tool_calls)]
    return message.content


def streamed_tools():
    messages = [{"role": "user", "content": WEATHER}]
    while True:
        chunks = litellm.completion(messages=messages, tools=[TOOL], stream=True, **SERVER)
        message = litellm.stream_chunk_builder(list(chunks)).choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *(_result(call) for call in message.tool_calls)]


def _result(call):
    city = json.loads(call.function.arguments)["city"]
    return {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"}


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
