"""Messages to tokens and back: chat template, incremental detokenising, tool calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.errors import BadMessages, ModelRefused

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"

ChatMessage = dict[str, Any]
"""An OpenAI-style message: role, content, and tool_calls or tool_call_id where they apply."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a prompt. `recorded`: an assistant's words, given instead of generated."""

    token_ids: tuple[int, ...]
    recorded: bool


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in the model's output; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer and chat template.

    Only what is new is rendered and encoded: a session's own token ids are never made again from text, since the
    ids that were generated can differ from those that encoding the text would give.
    """

    inner: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    eos_texts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        texts = tuple(str(t) for t in self.inner.convert_ids_to_tokens(list(self.eos_token_ids)))
        object.__setattr__(self, "eos_texts", texts)

    def prompt(
        self,
        recent: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: list[Any],
        generate: bool,
    ) -> list[Segment]:
        """Render `new` as it follows `recent`, and encode it.

        recent: the messages that were said before, as far as the template looks back (`keep_recent`). With
        `generate` the prompt ends where the assistant begins to speak. Raises BadMessages when the template
        refuses the messages.
        """
        segments: list[Segment] = []
        before = list(recent)
        waiting: list[ChatMessage] = []
        for message in new:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            segments += self._segment(before, waiting, tools, prompt=True, recorded=False)
            opened = [*before, *waiting]
            segments += self._segment(opened, [message], tools, prompt=False, recorded=True)
            before = [*opened, message]
            waiting = []
        if waiting or (new and generate):
            segments += self._segment(before, waiting, tools, prompt=generate, recorded=False)
        return segments

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens around it."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.inner.decode(list(token_ids)))

    def _segment(
        self,
        before: list[ChatMessage],
        new: list[ChatMessage],
        tools: list[Any],
        prompt: bool,
        recorded: bool,
    ) -> list[Segment]:
        if not new and not (prompt and before):
            return []
        start = self._said(before, tools, prompted=recorded)
        text = self._render([*before, *new], tools, prompt)
        if not text.startswith(start):
            start = self._same_turns(text, start)
        end = len(text) if prompt else _end(text, self.eos_texts)
        token_ids = tuple(self.encode(text[len(start) : end]))
        return [Segment(token_ids, recorded)] if token_ids else []

    def _said(self, messages: list[ChatMessage], tools: list[Any], prompted: bool) -> str:
        """The text that the cache already holds."""
        if not messages:
            return ""
        text = self._render(messages, tools, prompted)
        return text if prompted else text[: _end(text, self.eos_texts)]

    def _same_turns(self, text: str, start: str) -> str:
        """The prefix of `text` with as many ends of turn as `start`: for templates that rewrite earlier turns."""
        ends = [m.end() for m in re.finditer("|".join(map(re.escape, self.eos_texts)), text)]
        turns = sum(start.count(eos) for eos in self.eos_texts)
        if not 0 < turns <= len(ends):
            raise BadMessages(
                "the chat template renders the earlier messages differently when new ones follow"
            )
        return text[: ends[turns - 1]]

    def _render(self, messages: list[ChatMessage], tools: list[Any], prompt: bool) -> str:
        try:
            text = self.inner.apply_chat_template(
                [_for_template(m) for m in messages],
                tools=tools or None,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadMessages(f"the chat template refuses the messages: {error}") from error
        assert isinstance(text, str), "tokenize=False renders text"
        return text


def load_tokenizer(name: str | Path, eos_token_ids: Sequence[int]) -> ChatTokenizer:
    """Load a model's tokenizer. Raises ModelRefused without a fast tokenizer or a chat template."""
    try:
        inner = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name} has no tokenizer that could be loaded: {error}") from error
    if not isinstance(inner, PreTrainedTokenizerFast) or not inner.chat_template:
        raise ModelRefused(
            f"{name} needs a fast tokenizer with a chat template to hold conversations"
        )
    eos = [token for token in eos_token_ids if token != inner.eos_token_id]
    if inner.eos_token_id is not None and (not eos_token_ids or len(eos) < len(eos_token_ids)):
        eos.insert(0, inner.eos_token_id)  # first: an answer that was cut off is ended with it
    if not eos:
        raise ModelRefused(
            f"{name} has no end-of-turn token: neither its tokenizer nor its model names one"
        )
    return ChatTokenizer(inner, tuple(eos))


def keep_recent(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that rendering the next ones needs: a leading system message and all since the last user's."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    start = users[-1] if users else 0
    leading = [messages[0]] if start > 0 and messages[0]["role"] in ("system", "developer") else []
    return [*leading, *messages[start:]]


def parse_tool_calls(text: str) -> tuple[str, list[ParsedCall]]:
    """Split an answer into its text and its tool calls (Hermes: `<tool_call>{json}</tool_call>`).

    What looks like a call and is not well formed stays in the text, for the client to see.
    """
    calls: list[ParsedCall] = []
    plain: list[str] = []
    at = 0
    while (opening := text.find(TOOL_CALL_OPEN, at)) >= 0:
        call, end = _read_call(text, opening)
        plain.append(text[at : opening if call else end])
        calls += [call] if call else []
        at = end
    return "".join([*plain, text[at:]]).strip(), calls


class TextStream:
    """One answer's text as its tokens arrive: whole characters only, nothing of a tool call, stop strings held back."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.inner.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._marks = (*stop, TOOL_CALL_OPEN)
        self._stop = tuple(stop)
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that may be shown now. Sets `stopped` at a stop string."""
        self.text += self._stream.step(self._tokenizer, token_id) or ""
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
        return self._show(self._settled())

    def finish(self) -> str:
        """Text that was held back and turned out to be plain; what only looked like a tool call is plain, too."""
        _, calls = parse_tool_calls(self.text)
        return self._show(min(self._openings()) if calls else len(self.text))

    def _show(self, end: int) -> str:
        shown = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown

    def _openings(self) -> list[int]:
        return [at for at in [self.text.find(TOOL_CALL_OPEN)] if at >= 0]

    def _settled(self) -> int:
        """Where the text ends that no mark can begin in."""
        overlap = max(
            (
                n
                for mark in self._marks
                for n in range(1, len(mark))
                if self.text.endswith(mark[:n])
            ),
            default=0,
        )
        return min([len(self.text) - overlap, *self._openings()])


def _read_call(text: str, opening: int) -> tuple[ParsedCall | None, int]:
    """The call whose mark stands at `opening`, and where it ends; None and the mark's end when it is not one."""
    start = opening + len(TOOL_CALL_OPEN)
    start_of_json = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end_of_json = json.JSONDecoder().raw_decode(text, start_of_json)
    except (json.JSONDecodeError, RecursionError):
        return None, start
    rest = text[end_of_json:].lstrip()
    call = _as_call(value)
    if call is None or not rest.startswith(TOOL_CALL_CLOSE):
        return None, start
    return call, len(text) - len(rest) + len(TOOL_CALL_CLOSE)


def _as_call(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _for_template(message: ChatMessage) -> ChatMessage:
    """Templates of the field expect a call's arguments as an object, and a content that is a string."""
    rendered = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        rendered["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _as_object(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
    return rendered


def _as_object(arguments: str | dict[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _end(text: str, eos_texts: Sequence[str]) -> int:
    """Where the last turn of a rendering ends: after its end-of-turn token, before the white space behind it.

    A generated turn ends with that token and nothing else, so a recorded one is cut to end alike.
    """
    last = max((at + len(eos) for eos in eos_texts if (at := text.rfind(eos)) >= 0), default=-1)
    return last if last >= 0 and not text[last:].strip() else len(text)
