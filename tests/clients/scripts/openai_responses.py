"""OpenAI's own Python client: responses that follow each other."""

import json

# --8<-- [start:example]
import os

from _case import NAME, OPTIONS, TURNS, WEATHER, run
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1", api_key="any"
)
model = client.models.list().data[0].id


def ask(text, previous=None, **options):
    """Say only what is new: the response before names the conversation."""
    return client.responses.create(
        model=model, input=text, previous_response_id=previous, **options
    )


# --8<-- [end:example]

TOOL = {
    "type": "function",
    "name": "get_weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def plain():
    return ask(NAME, **OPTIONS).output_text


def streamed():
    events = ask(NAME, stream=True, **OPTIONS)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def turns():
    previous = None
    for text in TURNS:
        answer = ask(text, previous, **OPTIONS)
        previous = answer.id
    return answer.output_text


def tools():
    answer = ask(WEATHER, tools=[TOOL])
    while results := _run_tools(answer):
        answer = ask(results, answer.id, tools=[TOOL])
    return answer.output_text


def streamed_tools():
    answer = _stream(input=WEATHER)
    while results := _run_tools(answer):
        answer = _stream(input=results, previous_response_id=answer.id)
    return answer.output_text


def _stream(**options):
    with client.responses.stream(model=model, tools=[TOOL], **options) as events:
        return events.get_final_response()


def _run_tools(answer):
    calls = [item for item in answer.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": f"sunny in {json.loads(call.arguments)['city']}",
        }
        for call in calls
    ]


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
