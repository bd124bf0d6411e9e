"""Bodies of the chat doors: histories and settings as clients send them, with odd texts within."""

from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.cases.texts import identifiers, names, odd, references, texts
from benchmarks.fuzz.cases.values import arguments, grammars, numbers, schemas

Bodies = st.SearchStrategy[Any]
MODEL = "reference"
few_tokens = st.sampled_from((1, 1, 2, 4, 8))
flags = st.booleans()
_rarely_numbers = st.one_of(st.sampled_from((0, 0.7, 1)), numbers)


def _bodies(required: dict[str, Bodies], optional: dict[str, Bodies]) -> Bodies:
    """Objects with all of `required`, and about a quarter of `optional`."""

    def add(base: dict[str, Any]) -> Bodies:
        chosen = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
        return chosen.flatmap(
            lambda found: st.fixed_dictionaries({name: optional[name] for name in found})
        ).map(lambda more: {**base, **more})

    return st.fixed_dictionaries(required).flatmap(add)


def _functions(parameters: str) -> Bodies:
    return st.fixed_dictionaries({"name": names, "description": texts, parameters: schemas})


_call = st.fixed_dictionaries(
    {
        "id": identifiers,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": names, "arguments": arguments}),
    }
)
_text_part = st.fixed_dictionaries({"type": st.just("text"), "text": texts})
_image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_content = st.one_of(texts, texts, st.lists(_text_part, max_size=2), st.just([_image]))
_messages = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": _content}),
    st.fixed_dictionaries({"role": st.just("user"), "content": _content}),
    st.fixed_dictionaries({"role": st.sampled_from(("system", "developer")), "content": _content}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": _content}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.none(),
            "tool_calls": st.lists(_call, min_size=1, max_size=3),
        }
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "tool_call_id": identifiers, "content": _content, "name": names}
    ),
)
_history = st.lists(_messages, min_size=1, max_size=6)
_user_last = st.tuples(_history, texts).map(
    lambda pair: [*pair[0], {"role": "user", "content": pair[1]}]
)
_tools = st.lists(
    st.builds(
        lambda function: {"type": "function", "function": function}, _functions("parameters")
    ),
    max_size=3,
)
_form = st.one_of(
    st.just({"type": "json_object"}),
    st.builds(
        lambda name, schema, strict: {
            "type": "json_schema",
            "json_schema": {"name": name, "schema": schema, "strict": strict},
        },
        names,
        schemas,
        flags,
    ),
)
_sampling: dict[str, Bodies] = {
    "temperature": _rarely_numbers,
    "top_p": _rarely_numbers,
    "stop": st.one_of(texts, st.lists(texts, max_size=4)),
    "seed": numbers,
    "logit_bias": st.dictionaries(
        st.sampled_from(("0", "5", "-1", "9" * 30, "x")), numbers, max_size=3
    ),
    "frequency_penalty": numbers,
    "stream": flags,
    "user": texts,
    "metadata": st.dictionaries(names, texts, max_size=2),
    "min_tokens": numbers,
    "guided_grammar": grammars,
    "guided_regex": st.sampled_from(("a+", "(", "(a*)*b", ".*" * 40)),
    "stop_token_ids": st.lists(numbers, max_size=3),
    "top_logprobs": numbers,
    "logprobs": flags,
    "n": st.sampled_from((1, 2, 3, 0, 10_000)),
}
_choice = st.one_of(
    st.sampled_from(("auto", "none", "required")),
    st.builds(lambda name: {"type": "function", "function": {"name": name}}, names),
)
chat = _bodies(
    {
        "model": st.just(MODEL),
        "messages": st.one_of(_user_last, _history),
        "max_tokens": few_tokens,
    },
    {
        **_sampling,
        "tools": _tools,
        "tool_choice": _choice,
        "response_format": _form,
        "stream_options": st.just({"include_usage": True}),
        "kvrecall": st.fixed_dictionaries({"session": references}),
        "chat_template_kwargs": st.dictionaries(names, texts, max_size=2),
        "parallel_tool_calls": flags,
    },
)
completions = _bodies(
    {
        "model": st.just(MODEL),
        "prompt": st.one_of(texts, st.lists(texts, max_size=3), st.lists(numbers, max_size=5)),
        "max_tokens": few_tokens,
    },
    {**_sampling, "echo": flags, "suffix": texts, "best_of": numbers},
)
_items = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(("user", "system")),
        texts,
    ),
    st.builds(
        lambda call, name, text: {
            "type": "function_call",
            "call_id": call,
            "name": name,
            "arguments": text,
        },
        identifiers,
        names,
        arguments,
    ),
    st.builds(
        lambda call, text: {"type": "function_call_output", "call_id": call, "output": text},
        identifiers,
        texts,
    ),
    st.builds(lambda item: {"type": "item_reference", "id": item}, references),
    st.builds(lambda text: {"type": "reasoning", "summary": [], "encrypted_content": text}, texts),
)
responses = _bodies(
    {
        "model": st.just(MODEL),
        "input": st.one_of(texts, st.lists(_items, min_size=1, max_size=5)),
        "max_output_tokens": few_tokens,
    },
    {
        "instructions": texts,
        "previous_response_id": references,
        "conversation": st.one_of(references, st.builds(lambda each: {"id": each}, references)),
        "tools": st.lists(
            st.builds(lambda function: {"type": "function", **function}, _functions("parameters")),
            max_size=3,
        ),
        "text": st.builds(
            lambda name, schema: {
                "format": {"type": "json_schema", "name": name, "schema": schema}
            },
            names,
            schemas,
        ),
        "background": flags,
        "store": flags,
        "stream": flags,
        "temperature": _rarely_numbers,
        "metadata": st.dictionaries(names, texts, max_size=2),
        "truncation": odd,
    },
)
_blocks = st.one_of(
    _text_part,
    st.builds(
        lambda block, name, value: {"type": "tool_use", "id": block, "name": name, "input": value},
        identifiers,
        names,
        st.dictionaries(names, st.one_of(texts, numbers), max_size=2),
    ),
    st.builds(
        lambda block, text: {"type": "tool_result", "tool_use_id": block, "content": text},
        identifiers,
        texts,
    ),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": text}, texts),
)
messages = _bodies(
    {
        "model": st.just(MODEL),
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(("user", "user", "assistant")),
                    "content": st.one_of(texts, st.lists(_blocks, min_size=1, max_size=3)),
                }
            ),
            min_size=1,
            max_size=5,
        ),
        "max_tokens": few_tokens,
    },
    {
        "system": st.one_of(texts, st.lists(_text_part, max_size=2)),
        "tools": st.lists(_functions("input_schema"), max_size=3),
        "tool_choice": st.one_of(
            st.just({"type": "any"}), st.builds(lambda name: {"type": "tool", "name": name}, names)
        ),
        "stop_sequences": st.lists(texts, max_size=3),
        "temperature": _rarely_numbers,
        "top_k": numbers,
        "stream": flags,
        "metadata": st.builds(lambda text: {"user_id": text}, texts),
    },
)
_research = _bodies(
    {},
    {
        "repair_rows": st.one_of(st.sampled_from((0, 16)), numbers),
        "method": st.one_of(st.sampled_from(("snapkv", "epicache", "icecache", "loopserve")), odd),
        "episodes": st.just({"count": 2}),
    },
)
session = _bodies(
    {"budget": st.sampled_from((64, 96, 128))},
    {
        "recall": flags,
        "seed": numbers,
        "tools": _tools,
        "metadata": st.dictionaries(names, texts, max_size=2),
        "expires_after_seconds": numbers,
        "research": _research,
    },
)
turn = _bodies(
    {"messages": st.one_of(_history, _user_last), "max_tokens": few_tokens},
    {
        "generate": flags,
        "stream": flags,
        "wait_for_repairs": flags,
        "temperature": _rarely_numbers,
        "stop": st.lists(texts, max_size=3),
        "seed": numbers,
        "response_format": _form,
        "tool_choice": _choice,
        "logprobs": st.builds(lambda session: {"compare_with": session}, references),
    },
)
event = _bodies(
    {
        "type": st.sampled_from(
            ("tool_call.started", "tool_call.delta", "tool_call.completed", "tool_call.failed")
        ),
        "call_id": identifiers,
    },
    {"result": texts, "delta": texts, "index": numbers, "arguments": arguments},
)
fork = _bodies({}, {"turn": numbers, "metadata": st.dictionaries(names, texts, max_size=2)})
conversation = _bodies(
    {},
    {"items": st.lists(_items, max_size=3), "metadata": st.dictionaries(names, texts, max_size=2)},
)
items = st.fixed_dictionaries({"items": st.lists(_items, min_size=1, max_size=3)})
tokenize = _bodies(
    {}, {"prompt": texts, "messages": _history, "tokens": st.lists(numbers, max_size=4)}
)
