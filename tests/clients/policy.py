"""The scripted model of the client tests: a pure function from messages and tools to an answer.

It looks at what was said as a model would, so a conversation that lost its beginning is noticed.
"""

import json
import re
from collections.abc import Sequence

from kvrecall.protocol.v1 import worker_pb2 as pb

_NAME = re.compile(r"[Mm]y name is (\w+)")
_CITY = re.compile(r"weather in (\w+)")
_FIELDS = re.compile(r"\[\[ ## (\w+) ## \]\]")
# Agents that tell a tool's result as a user's message begin it with this word.
_OBSERVATION = re.compile(r"Observation:\s*(.*)", re.DOTALL)


def answer(messages: Sequence[pb.Message], tools: Sequence[str]) -> str | list[pb.ToolCall]:
    """Answer the last message: with a call, or with what a tool or the user said before.

    - The weather in a city: a call of the tool whose name has "weather", with the city.
    - The result of a tool: "The answer is", and the result.
    - A question for the user's name: the name, if any message has it.

    An agent with a tool `final_answer` gets its answers as calls of it; a prompt with named fields
    (DSPy) gets them in these fields.
    """
    said = [message for message in messages if message.role == "user"]
    functions = {str(tool["name"]): tool for tool in (_get_function(tool) for tool in tools)}
    last = messages[-1]
    observed = _OBSERVATION.search(last.content) if last.role == "user" else None
    if last.role == "tool" or observed:
        result = observed[1].strip() if observed else last.content
        return _finish(f"The answer is: {result}", functions, len(messages))
    asked = _CITY.findall(last.content)
    weather = next((name for name in functions if "weather" in name), None)
    if asked and weather:
        return [_call(functions[weather], asked[-1], len(messages))]
    names = [name for message in said for name in _NAME.findall(message.content)]
    text = f"Your name is {names[-1]}." if names else "Nobody told me a name."
    return _finish(_in_fields(text, last.content), functions, len(messages))


def _get_function(tool: str) -> dict[str, object]:
    function: dict[str, object] = json.loads(tool)["function"]
    return function


def _call(function: dict[str, object], argument: str, number: int) -> pb.ToolCall:
    """Call a function with the argument as its first parameter."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    first = next(iter(properties)) if isinstance(properties, dict) and properties else "city"
    arguments = json.dumps({first: argument})
    return pb.ToolCall(id=f"call_{number}", name=str(function["name"]), arguments=arguments)


def _finish(
    text: str, functions: dict[str, dict[str, object]], number: int
) -> str | list[pb.ToolCall]:
    if "final_answer" in functions:
        return [_call(functions["final_answer"], text, number)]
    return text


def _in_fields(text: str, prompt: str) -> str:
    """Put the text into each output field that the prompt's end asks for."""
    _, marked, wanted = prompt.rpartition("Respond with the corresponding output fields")
    names = [name for name in _FIELDS.findall(wanted) if name != "completed"]
    if not (marked and names):
        return text
    fields = [f"[[ ## {name} ## ]]\n{text}\n" for name in names]
    return "\n".join([*fields, "[[ ## completed ## ]]"])
