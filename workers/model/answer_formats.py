"""How a model's answers write reasoning and tool calls: one row per family, found by its tokenizer.

Of a family's form only the marks and the reading of one call differ, so that all families are
streamed alike (`workers.model.text_stream`). A tokenizer's own `response_template` comes first: its
regions are parsed by transformers' parser, one at a time, since a region that is malformed ends
that parser's stream, while here it must stay text. Otherwise the chat template tells: it shows the
model the form. A model's type does not, as Qwen3 and Qwen3 Coder have the same one, and so have
Llama 3 and many models that were trained to other forms.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from workers.model.answer_format import AnswerFormat, Channels
from workers.model.calls.by_first import ByFirst
from workers.model.calls.grammar import LINE, NUMBER, CallGrammar, Parameters
from workers.model.calls.ids import CallIds
from workers.model.calls.keyed_calls import KeyedCalls
from workers.model.calls.named_calls import NamedCalls, read_harmony, read_mistral_args
from workers.model.calls.object_calls import ObjectCalls
from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Reading
from workers.model.calls.tagged_calls import TaggedCalls
from workers.model.calls.template_region import read_template_region
from workers.model.calls.values import Values

_OBJECT = CallGrammar(opening=('{{"name": "{name}", "arguments": ',), closing=("}}",))
_LIST = replace(_OBJECT, separator=(", ",), before="[", after="]")
_PROGRAM = CallGrammar(
    opening=("{name}(",),
    closing=(")",),
    parameters=Parameters("", "=", separator=", ", quoted=True),
)

HERMES = AnswerFormat(
    "hermes",
    "<tool_call>",
    ObjectCalls(closing="</tool_call>"),
    CallGrammar(
        opening=(LINE, *_OBJECT.opening),
        closing=(*_OBJECT.closing, LINE, "</tool_call>"),
        separator=(LINE, "<tool_call>"),
    ),
)
_QWEN_XML = AnswerFormat(
    "qwen-xml",
    "<tool_call>",
    TaggedCalls(
        call=("<function=", ">", "</function>"),
        parameter=("<parameter=", ">", "</parameter>"),
        ending="</tool_call>",
        padded=True,
    ),
    CallGrammar(
        opening=(LINE, "<function={name}>\n"),
        closing=("</function>", LINE, "</tool_call>"),
        separator=(LINE, "<tool_call>"),
        parameters=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
    ),
)
_GLM = AnswerFormat(
    "glm",
    "<tool_call>",
    TaggedCalls(
        call=("", "", "</tool_call>"),
        parameter=("<arg_key>", "</arg_key>", "</arg_value>"),
        value="<arg_value>",
    ),
    CallGrammar(
        opening=("{name}", LINE),
        closing=("</tool_call>",),
        separator=(LINE, "<tool_call>"),
        parameters=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    inner_marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_MINIMAX = AnswerFormat(
    "minimax",
    "<minimax:tool_call>",
    TaggedCalls(
        call=('<invoke name="', '">', "</invoke>"),
        parameter=('<parameter name="', '">', "</parameter>"),
        ending="</minimax:tool_call>",
        several=True,
    ),
    CallGrammar(
        opening=('<invoke name="{name}">\n',),
        closing=("</invoke>\n",),
        separator=(),
        before="\n",
        after="</minimax:tool_call>",
        parameters=Parameters('<parameter name="', '">', "</parameter>\n"),
    ),
    inner_marks=("</minimax:tool_call>",),
)
_READ_LLAMA = ObjectCalls(members=("parameters", "arguments"), others=("type",), separator=";")
_LLAMA = AnswerFormat(
    "llama",
    "<|python_tag|>",
    _READ_LLAMA,
    CallGrammar(opening=('{{"name": "{name}", "parameters": ',), closing=("}}",)),
    bare="{",
)
_LLAMA4 = replace(
    _LLAMA,
    name="llama4",
    mark="<|python_start|>",
    read=ByFirst({"[": KeyedCalls()}, _READ_LLAMA),
    bare="{[",
)
_READ_LIST = ObjectCalls(listed=True)
_MISTRAL = AnswerFormat("mistral", "[TOOL_CALLS]", _READ_LIST, _LIST, call_ids=CallIds.SHORT)
_MISTRAL_ARGS = replace(
    _MISTRAL,
    name="mistral-args",
    read=ByFirst({"[": _READ_LIST}, read_mistral_args),
    grammar=CallGrammar(opening=("{name}[ARGS]",), separator=("[TOOL_CALLS]",)),
    inner_marks=("[ARGS]", "[CALL_ID]"),
)
_GRANITE = AnswerFormat("granite", "<|tool_call|>", _READ_LIST, _LIST)
_NEMOTRON = AnswerFormat(
    "nemotron",
    "<TOOLCALL>",
    ObjectCalls(listed=True, closing="</TOOLCALL>"),
    replace(_LIST, after="]</TOOLCALL>"),
    inner_marks=("</TOOLCALL>",),
)
_DEEPSEEK = AnswerFormat(
    "deepseek",
    "<｜tool▁calls▁begin｜>",
    NamedCalls(
        opening="<｜tool▁call▁begin｜>",
        between="<｜tool▁sep｜>",
        closing=("<｜tool▁call▁end｜>",),
        ending="<｜tool▁calls▁end｜>",
    ),
    CallGrammar(
        opening=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",),
        closing=("<｜tool▁call▁end｜>",),
        separator=(),
        after="<｜tool▁calls▁end｜>",
    ),
    inner_marks=(
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
)
_DEEPSEEK_FENCED = replace(
    _DEEPSEEK,
    name="deepseek-fenced",
    read=NamedCalls(
        opening="<｜tool▁call▁begin｜>",
        before="function<｜tool▁sep｜>",
        between="```json",
        closing=("```", "<｜tool▁call▁end｜>"),
        ending="<｜tool▁calls▁end｜>",
    ),
    grammar=CallGrammar(
        opening=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",),
        closing=("\n```<｜tool▁call▁end｜>",),
        separator=("\n",),
        after="<｜tool▁calls▁end｜>",
    ),
)
_KIMI = AnswerFormat(
    "kimi",
    "<|tool_calls_section_begin|>",
    NamedCalls(
        opening="<|tool_call_begin|>",
        between="<|tool_call_argument_begin|>",
        closing=("<|tool_call_end|>",),
        ending="<|tool_calls_section_end|>",
        numbered=True,
    ),
    CallGrammar(
        opening=("<|tool_call_begin|>functions.{name}:", NUMBER, "<|tool_call_argument_begin|>"),
        closing=("<|tool_call_end|>",),
        separator=(),
        after="<|tool_calls_section_end|>",
    ),
    inner_marks=(
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        "<|tool_calls_section_end|>",
    ),
    call_ids=CallIds.NUMBERED,
)
_LFM2 = AnswerFormat(
    "lfm2",
    "<|tool_call_start|>",
    KeyedCalls(ending="<|tool_call_end|>"),
    replace(_PROGRAM, separator=(", ",), before="[", after="]<|tool_call_end|>"),
    inner_marks=("<|tool_call_end|>",),
)
_OLMO = AnswerFormat(
    "olmo",
    "<function_calls>",
    KeyedCalls(ending="</function_calls>"),
    replace(_PROGRAM, separator=("\n",), after="</function_calls>"),
    inner_marks=("</function_calls>",),
)
_GEMMA = AnswerFormat(
    "gemma",
    "<|tool_call>",
    KeyedCalls(
        Values(raw_quotes=('<|"|>',), bare_keys=True), "call:", ("{", "}"), ":", "<tool_call|>"
    ),
    CallGrammar(
        opening=("call:{name}",),
        closing=("<tool_call|>",),
        separator=("<|tool_call>",),
        quote='<|"|>',
    ),
    inner_marks=("<tool_call|>", '<|"|>', "<|channel>"),
)
_FUNCTION_GEMMA = AnswerFormat(
    "function-gemma",
    "<start_function_call>",
    KeyedCalls(
        Values(raw_quotes=("<escape>",), bare_keys=True),
        *("call:", ("{", "}"), ":", "<end_function_call>"),
    ),
    CallGrammar(
        opening=("call:{name}",),
        closing=("<end_function_call>",),
        separator=("<start_function_call>",),
        quote="<escape>",
    ),
    inner_marks=("<end_function_call>", "<escape>"),
)
_HARMONY = AnswerFormat(
    "harmony",
    " to=functions.",
    read_harmony,
    CallGrammar(opening=("{name} <|constrain|>json<|message|>",)),
    channels=Channels(
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        text="<|channel|>final<|message|>",
        call="<|channel|>commentary",
        end="<|end|>",
        last="<|return|>",
    ),
    inner_marks=(
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
)
_PLAIN = AnswerFormat("plain")
# The first row whose texts are all in the chat template is the model's.
_FAMILIES: tuple[tuple[tuple[str, ...], AnswerFormat], ...] = (
    (("<|channel|>", "<|message|>"), _HARMONY),
    (("<|tool_call>", "<tool_call|>"), _GEMMA),
    (("<start_function_call>", "<end_function_call>"), _FUNCTION_GEMMA),
    (("<|tool_calls_section_begin|>",), _KIMI),
    (("<｜tool▁calls▁begin｜>", "```json"), _DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), _DEEPSEEK),
    (("<minimax:tool_call>",), _MINIMAX),
    (("<TOOLCALL>",), _NEMOTRON),
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),
    (("<function_calls>",), _OLMO),
    (("<|tool_call|>",), _GRANITE),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>", "<function=", "<parameter="), _QWEN_XML),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    (("<|header_start|>", '"parameters"'), _LLAMA4),
    (("<|start_header_id|>", '"parameters"'), _LLAMA),
)
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


def find_format(tokenizer: PreTrainedTokenizerFast) -> AnswerFormat:
    """Find the form of a model's answers; one without calls if nothing tells of them."""
    template = str(tokenizer.chat_template or "")
    rows = (row for texts, row in _FAMILIES if all(text in template for text in texts))
    found = next(rows, _PLAIN)
    vocabulary = tokenizer.get_added_vocab()
    for marks in _REASONING:
        if marks[1] in template or all(mark in vocabulary for mark in marks):
            found = replace(found, reasoning=marks)
    own = getattr(tokenizer, "response_template", None)
    return _from_template(own, found) if isinstance(own, dict) else found


def _from_template(template: dict[str, Any], known: AnswerFormat) -> AnswerFormat:
    """Take the marks of a `response_template` where they are literal; else what is known stays."""
    fields = template.get("fields") or {}
    calls = fields.get("tool_calls") or {}
    mark, close = calls.get("open"), calls.get("close")
    if isinstance(mark, str) and isinstance(close, str):

        def read(source: CallSource, sink: CallSink, tools: Sequence[Any]) -> Reading[None]:
            return read_template_region(source, sink, tools, mark, close, template)

        same = mark == known.mark
        known = replace(
            known,
            name=known.name if same else "response_template",
            mark=mark,
            read=read,
            grammar=known.grammar if same else None,
            bare=known.bare if same else "",
        )
    for name in ("reasoning_content", "thinking", "reasoning"):
        region = fields.get(name) or {}
        opening, closing = region.get("open"), region.get("close")
        if isinstance(opening, str) and isinstance(closing, str):
            return replace(known, reasoning=(opening.strip(), closing.strip()))
    return known
