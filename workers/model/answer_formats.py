"""How a model's answers write reasoning and tool calls: one row per family, found by its tokenizer.

Of a family's form only the marks and the reading of one call differ, so that all families are
streamed alike (`workers.model.text_stream`). A tokenizer's own `response_template` comes first: its
regions are parsed by transformers' parser, one at a time, since a region that is malformed ends
that parser's stream, while here it must stay text. Otherwise the chat template tells: it shows the
model the form. A model's type does not, as Qwen3 and Qwen3 Coder have the same one, and so have
Llama 3 and many models that were trained to other forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from kvrecall.domain.answer.constraints import TAGGED_CALLS, UNGUIDED_CALLS
from workers.model.call_parsing import (
    CallSink,
    Reader,
    read_hermes,
    read_llama,
    read_mistral,
    read_mistral_args,
    read_qwen_xml,
    read_template_region,
)
from workers.model.call_source import CallSource, Reading

# In a `CallGrammar`: a line break that may be there.
LINE = "\n?"


@dataclass(frozen=True)
class CallGrammar:
    """The text of an answer's calls behind the first mark, in pieces; `LINE` may be left out.

    Each call is `opening`, in which `{name}` stands for the tool's, its arguments, and `closing`.
    `separator`: between two calls; None if there is one at most. `xml`: arguments are parameters in
    tags, not a JSON object.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    separator: tuple[str, ...] | None = None
    before: str = ""
    after: str = ""
    xml: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """A family's form of answers.

    - `mark`: the text that opens a call; empty if calls are not known.
    - `read`: reads the calls that a mark opens, up to the end of their text.
    - `grammar`: of the text behind the mark; None if it is not known.
    - `bare`: a call may be an answer that is one JSON object, without a mark.
    - `reasoning`: the texts around an answer's reasoning, at its beginning; None without.
    - `inner_marks`: texts within a call that may be tokens of their own.
    - `short_ids`: the chat template takes only ids of calls with 9 letters and digits.
    """

    name: str
    mark: str = ""
    read: Reader | None = None
    grammar: CallGrammar | None = None
    bare: bool = False
    reasoning: tuple[str, str] | None = None
    inner_marks: tuple[str, ...] = ()
    short_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that an answer's parts are told by."""
        outer = (self.mark, *(self.reasoning or ()))
        return (*(text for text in outer if text), *self.inner_marks)


HERMES = AnswerFormat(
    "hermes",
    "<tool_call>",
    read_hermes,
    CallGrammar(
        opening=(LINE, '{{"name": "{name}", "arguments": '),
        closing=("}}", LINE, "</tool_call>"),
        separator=(LINE, "<tool_call>"),
    ),
)
_QWEN_XML = AnswerFormat(
    TAGGED_CALLS,
    "<tool_call>",
    read_qwen_xml,
    CallGrammar(
        opening=(LINE, "<function={name}>\n"),
        closing=("</function>", LINE, "</tool_call>"),
        separator=(LINE, "<tool_call>"),
        xml=True,
    ),
)
_LLAMA = AnswerFormat(
    "llama",
    "<|python_tag|>",
    read_llama,
    CallGrammar(opening=('{{"name": "{name}", "parameters": ',), closing=("}}",)),
    bare=True,
)
_MISTRAL = AnswerFormat(
    "mistral",
    "[TOOL_CALLS]",
    read_mistral,
    CallGrammar(
        opening=('{{"name": "{name}", "arguments": ',),
        closing=("}}",),
        separator=(", ",),
        before="[",
        after="]",
    ),
    short_ids=True,
)
_MISTRAL_ARGS = replace(
    _MISTRAL,
    name="mistral-args",
    read=read_mistral_args,
    grammar=CallGrammar(opening=("{name}[ARGS]",), closing=(), separator=("[TOOL_CALLS]",)),
    inner_marks=("[ARGS]", "[CALL_ID]"),
)
_PLAIN = AnswerFormat("plain")
# The first row whose texts are all in the chat template is the model's.
_FAMILIES: tuple[tuple[tuple[str, ...], AnswerFormat], ...] = (
    (("<tool_call>", "<function=", "<parameter="), _QWEN_XML),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    (("<|start_header_id|>", '"parameters"'), _LLAMA),
)
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


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
            name=known.name if same else UNGUIDED_CALLS,
            mark=mark,
            read=read,
            grammar=known.grammar if same else None,
            bare=known.bare and same,
        )
    for name in ("reasoning_content", "thinking", "reasoning"):
        region = fields.get(name) or {}
        opening, closing = region.get("open"), region.get("close")
        if isinstance(opening, str) and isinstance(closing, str):
            return replace(known, reasoning=(opening.strip(), closing.strip()))
    return known
