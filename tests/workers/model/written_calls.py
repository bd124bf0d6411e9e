"""Calls as the model families write them, and what their chat templates are known by."""

import json
from collections.abc import Callable
from typing import Any

# What a chat template of the family has in it, and tokens of its own.
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": ("<tool_call> <think>\n</think>", ()),
    "qwen-xml": ("<tool_call> <function= <parameter= </think>", ()),
    "glm": (
        "<tool_call>{name} <arg_key> </think>",
        (
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    "minimax": ("<minimax:tool_call> </think>", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "llama": ('<|start_header_id|> {"name": x, "parameters": y}', ("<|python_tag|>",)),
    "llama4": (
        '<|header_start|> {"name": x, "parameters": y}',
        ("<|python_start|>", "<|python_end|>"),
    ),
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "mistral-args": ("[TOOL_CALLS] [ARGS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "granite": ("respond with <|tool_call|> and a list", ("<|tool_call|>",)),
    "nemotron": ("<TOOLCALL>[]</TOOLCALL> </think>", ()),
    "deepseek": (
        "<｜tool▁calls▁begin｜> </think>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
    ),
    "deepseek-fenced": (
        "<｜tool▁calls▁begin｜> ```json </think>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
    ),
    "kimi": (
        "<|tool_calls_section_begin|> </think>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "lfm2": ("<|tool_call_start|> </think>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo": ("<function_calls> </think>", ()),
    "gemma": ("<|tool_call> <tool_call|> <channel|>", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "function-gemma": (
        "<start_function_call> <end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "harmony": (
        "<|channel|> <|message|>",
        (
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
    ),
    "plain": ("no calls", ()),
}
OBJECT = '{"city": "Oslo", "days": 2}'
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OBJECT}}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>'
    '\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {OBJECT}}}',
    "llama4": "<|python_start|>[weather(city='Oslo', days=2)]",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {OBJECT}}}]',
    "mistral-args": f"[TOOL_CALLS]weather[ARGS]{OBJECT}",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {OBJECT}}}]',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {OBJECT}}}]</TOOLCALL>',
    "deepseek": f"{_DEEPSEEK[0]}weather<｜tool▁sep｜>{OBJECT}{_DEEPSEEK[1]}",
    "deepseek-fenced": f"{_DEEPSEEK[0]}function<｜tool▁sep｜>weather\n```json\n{OBJECT}\n```"
    f"{_DEEPSEEK[1]}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=2)]<|tool_call_end|>',
    "olmo": '<function_calls>weather(city="Oslo", days=2)</function_calls>',
    "gemma": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "function-gemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}"
    "<end_function_call>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{OBJECT}<|call|>",
}
# What is no call, though it begins like one: a value that is none, and an end before the arguments.
MALFORMED = {
    "hermes": ("<tool_call>{weather}</tool_call>", '<tool_call>{"name": "weather"'),
    "qwen-xml": (
        "<tool_call><function=weather>Oslo</function></tool_call>",
        "<tool_call><function=weather><parameter=city",
    ),
    "glm": ("<tool_call>{weather}</tool_call>", "<tool_call>weather\n<arg_key>city</arg_key>"),
    "minimax": (
        "<minimax:tool_call>weather</minimax:tool_call>",
        '<minimax:tool_call><invoke name="weather"><parameter name=',
    ),
    "llama": ("<|python_tag|>weather.get()", '<|python_tag|>{"name": "weather", "par'),
    "llama4": ("<|python_start|>[weather, Oslo]", "<|python_start|>[weather(city"),
    "mistral": ("[TOOL_CALLS]{}", '[TOOL_CALLS][{"name": "weather", "arguments":'),
    "mistral-args": ("[TOOL_CALLS]weather(Oslo)", "[TOOL_CALLS]weather[ARGS]"),
    "granite": ("<|tool_call|> is a token", '<|tool_call|>[{"name": "weather"'),
    "nemotron": ("<TOOLCALL>weather</TOOLCALL>", '<TOOLCALL>[{"name": "weather",'),
    "deepseek": (
        f"{_DEEPSEEK[0]}weather<｜tool▁sep｜>Oslo",
        f"{_DEEPSEEK[0]}weather<｜tool▁sep｜>",
    ),
    "deepseek-fenced": (
        f"{_DEEPSEEK[0]}function<｜tool▁sep｜>weather\n```json\nOslo\n```",
        f"{_DEEPSEEK[0]}function<｜tool▁sep｜>weather\n```js",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>weather<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0",
    ),
    "lfm2": ("<|tool_call_start|>[weather]", "<|tool_call_start|>[weather("),
    "olmo": ("<function_calls>weather(Oslo)", "<function_calls>weather(city"),
    "gemma": ("<|tool_call>weather{}", '<|tool_call>call:weather{<|"|>city'),
    "function-gemma": ("<start_function_call>call weather", "<start_function_call>call:weather{c"),
}


def _to_python(value: Any, quote: str = "") -> str:
    """Write a value as Python does, or with strings in quotes that end at the next one."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if quote else repr(value)
    if isinstance(value, list):
        return f"[{','.join(_to_python(each, quote) for each in value)}]"
    if isinstance(value, dict):
        members = (
            f"{_to_python(key, quote)}: {_to_python(each, quote)}" for key, each in value.items()
        )
        return f"{{{', '.join(members)}}}"
    return json.dumps(value) if quote else repr(value)


def _program(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_to_python(it)}' for key, it in arguments.items())})"


def _gemma(call: tuple[str, dict[str, Any]], quote: str) -> str:
    name, arguments = call
    written = (f"{key}:{_to_python(it, quote)}" for key, it in arguments.items())
    return f"call:{name}{{{','.join(written)}}}"


def _tag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


Calls = list[tuple[str, dict[str, Any]]]
# Forms in which any call can be written, as it is read again.
SPELLED: dict[str, Callable[..., str]] = {
    "hermes": lambda calls, write: "".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {write(it)}}}\n</tool_call>'
        for name, it in calls
    ),
    "llama": lambda calls, write: (
        "<|python_tag|>"
        + ";".join(f'{{"name": "{name}", "parameters": {write(it)}}}' for name, it in calls)
    ),
    "llama4": lambda calls, write: (
        f"<|python_start|>[{', '.join(_program(*each) for each in calls)}]"
    ),
    "mistral": lambda calls, write: f"[TOOL_CALLS]{_list(calls, write)}",
    "mistral-args": lambda calls, write: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{write(it)}" for name, it in calls
    ),
    "granite": lambda calls, write: f"<|tool_call|>{_list(calls, write)}",
    "nemotron": lambda calls, write: f"<TOOLCALL>{_list(calls, write)}</TOOLCALL>",
    "deepseek": lambda calls, write: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{write(it)}<｜tool▁call▁end｜>"
            for name, it in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek-fenced": lambda calls, write: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{write(it)}\n```<｜tool▁call▁end｜>"
            for name, it in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi": lambda calls, write: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{write(it)}"
            "<|tool_call_end|>"
            for index, (name, it) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "lfm2": lambda calls, write: (
        "<|tool_call_start|>[" + ", ".join(_program(*each) for each in calls) + "]<|tool_call_end|>"
    ),
    "olmo": lambda calls, write: (
        "<function_calls>" + "\n".join(_program(*each) for each in calls) + "</function_calls>"
    ),
    "gemma": lambda calls, write: "".join(
        f"<|tool_call>{_gemma(each, f'<|{chr(34)}|>')}<tool_call|>" for each in calls
    ),
    "function-gemma": lambda calls, write: "".join(
        f"<start_function_call>{_gemma(each, '<escape>')}<end_function_call>" for each in calls
    ),
    "harmony": lambda calls, write: "".join(
        f" to=functions.{name} <|constrain|>json<|message|>{write(it)}" for name, it in calls
    ),
}
# Forms in which a value is text as it is.
_TAGGED: dict[str, Callable[[Calls], str]] = {
    "qwen-xml": lambda calls: "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_tag(it)}\n</parameter>\n" for key, it in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    ),
    "glm": lambda calls: "".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_tag(it)}</arg_value>\n"
            for key, it in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    ),
    "minimax": lambda calls: (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{name}">\n'
            + "".join(
                f'<parameter name="{key}">{_tag(it)}</parameter>\n' for key, it in given.items()
            )
            + "</invoke>\n"
            for name, given in calls
        )
        + "</minimax:tool_call>"
    ),
}
TAGGED = frozenset(_TAGGED)


def write(form: str, calls: Calls, **style: Any) -> str:
    """Write calls in a form; `style` is of `json.dumps`, where arguments are a JSON object."""
    if not calls:
        return ""
    if form in _TAGGED:
        return _TAGGED[form](calls)
    return SPELLED[form](calls, lambda arguments: json.dumps(arguments, **style))


def _list(calls: Calls, write: Callable[[Any], str]) -> str:
    items = (f'{{"name": "{name}", "arguments": {write(it)}}}' for name, it in calls)
    return f"[{', '.join(items)}]"
