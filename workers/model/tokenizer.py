"""Chat messages to tokens and back, by a model's tokenizer and chat template."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateError
from pydantic_core import from_json
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvrecall.domain.page_ids import count_common
from kvrecall.domain.tolerance.surrogates import replace_in_json
from kvrecall.sandbox.deadline import DeadlinePassed, limit_seconds
from workers.errors import BadMessages, ModelRefused
from workers.model.answer_format import AnswerFormat
from workers.model.answer_formats import HERMES, find_format
from workers.model.calls.ids import write_ids
from workers.model.calls.messages import (
    FRAME,
    can_write_tools,
    split_calls,
    takes_text_arguments,
    write_tools,
)
from workers.model.one_rendering import render_together

_log = structlog.get_logger(__name__)

# An OpenAI-style message: role, content, and tool_calls or tool_call_id where they apply.
ChatMessage = dict[str, Any]
# A character that stands for none (Unicode): it parts the letters of a mark in a client's text.
_APART = "\ufdd0"
# The template is tried with a few messages when it is loaded.
_LOAD_SECONDS = 30.0
# Members that templates read the reasoning of an answer from: Qwen, GLM, DeepSeek; gpt-oss; others.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Tokens at the end of a prompt that tell whether it opens the reasoning.
_LOOK_BACK = 16


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a prompt.

    Attributes:
        token_ids: The token ids.
        recorded: True for an assistant's message that is given instead of generated.
    """

    token_ids: tuple[int, ...]
    recorded: bool


@dataclass(frozen=True)
class _Setting:
    """What each rendering of a session has beside its messages: tools, and the template's arguments."""

    tools: list[Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer and chat template.

    Only new messages are rendered and encoded: a session's token ids are never recreated from text,
    since generated ids can differ from the ids of their text.

    A mark of the conversation's form, such as a turn's end, is the template's: in what a client
    sends, be it a message, an argument, a tool or a document, its letters are encoded as plain text.

    Attributes:
        inner: The tokenizer.
        eos_token_ids: Token ids that end a turn; the first ends a truncated answer.
        eos_texts: Texts of these tokens.
        format: How the model's answers write reasoning and tool calls.
        writes_tools: The chat template has no tools: messages are written with them before it.
        text_arguments: The chat template takes the arguments of calls as JSON text, not as objects.
        mark_texts: Texts of the tokens that are marks of this format, by id.
        template_seconds: Seconds that the messages of one turn may take to be rendered and encoded.
    """

    inner: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    eos_texts: tuple[str, ...] = field(init=False)
    format: AnswerFormat = field(init=False)
    writes_tools: bool = field(init=False)
    text_arguments: bool = field(init=False)
    mark_texts: Mapping[int, str] = field(init=False)
    template_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Look up the texts of the end-of-turn tokens, the format and its marks."""
        texts = tuple(str(t) for t in self.inner.convert_ids_to_tokens(list(self.eos_token_ids)))
        object.__setattr__(self, "eos_texts", texts)
        known = find_format(self.inner)
        writes_tools = not known.mark and can_write_tools(self.inner)
        if writes_tools:
            known = replace(HERMES, reasoning=known.reasoning)
        object.__setattr__(self, "format", known)
        object.__setattr__(self, "writes_tools", writes_tools)
        object.__setattr__(self, "text_arguments", takes_text_arguments(self.inner))
        added = self.inner.get_added_vocab()
        marks = {added[mark]: mark for mark in self.format.marks if mark in added}
        object.__setattr__(self, "mark_texts", marks)

    def prompt(
        self,
        recent: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: list[Any],
        generate: bool,
        *,
        arguments: Mapping[str, Any] | None = None,
        opening: str = "",
    ) -> list[Segment]:
        """Render and encode `new` as the continuation of `recent`.

        A message is rendered a fixed number of times, however many there are (`keep_recent`).

        Args:
            recent: Earlier messages, as far as the template looks back (`keep_recent`).
            new: Messages to append.
            tools: Definitions of the session's tools.
            generate: If True, the prompt ends where the assistant's answer begins.
            arguments: Further arguments of the chat template, such as `enable_thinking`.
            opening: The beginning of the answer, at the end of a prompt that it is generated from.

        Raises:
            BadMessages: The template refuses the messages, or takes too long for them.
        """
        setting = _Setting(tools, arguments or {})
        encode = partial(self._encode_all, recent, new, setting, generate, opening)
        return render_together(encode, self.template_seconds)

    def _encode_all(
        self,
        recent: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        setting: _Setting,
        generate: bool,
        opening: str,
    ) -> list[Segment]:
        segments: list[Segment] = []
        before = list(recent)
        waiting: list[ChatMessage] = []
        for message in new:
            if message["role"] != "assistant":
                waiting.append(message)
                continue
            segments += self._encode_recorded(before, waiting, message, setting)
            before = keep_recent([*before, *waiting, message])
            waiting = []
        if waiting or (before and new and generate):
            segments += self._encode_prompt(before, waiting, setting, generate, opening)
        return segments

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Encode plain text, with the special tokens that the tokenizer puts around one if asked.

        Raises BadMessages for what is no text in UTF-8: a lone surrogate that an escape was.
        """
        try:
            return list(self.inner.encode(text, add_special_tokens=special_tokens))
        except (TypeError, UnicodeError) as error:
            raise BadMessages(
                "the text cannot be encoded: it has a lone surrogate, half of a character; send the "
                "whole character, or U+FFFD in its place"
            ) from error

    def encode_plain(self, text: str) -> list[int]:
        """Encode a client's text, in which no mark is a token of its own. Raises BadMessages."""
        stretches = _part(text, self._in_text).split(_APART)
        return [token for stretch in stretches for token in self.encode(stretch)]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return [str(piece) for piece in self.inner.convert_ids_to_tokens(list(token_ids))]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, special tokens included."""
        return str(self.inner.decode(list(token_ids)))

    def keep_end(self, token: int) -> int:
        """Return the token that an answer's end is kept as: in history it may be another one."""
        channels = self.format.channels
        if channels is None:
            return token
        added = self.inner.get_added_vocab()
        return added.get(channels.end, token) if added.get(channels.last) == token else token

    def opens_reasoning(self, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt ends within the answer's reasoning; None if the answer itself tells."""
        if self.format.channels is not None:
            return None
        if self.format.reasoning is None:
            return False
        opening, closing = self.format.reasoning
        text = self.decode(prompt[-_LOOK_BACK:]).rstrip()
        if text.endswith(closing):
            return False
        return True if text.endswith(opening) else None

    def restate(
        self,
        earlier: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: list[Any],
        *,
        leading: Sequence[ChatMessage] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Render `earlier` as the template says it when `new` follows; returns a piece for each turn.

        A piece ends with a mark that ends a turn. leading: the system's message at the beginning of
        the conversation. Raises BadMessages.
        """
        setting = _Setting(tools, arguments or {})
        restate = partial(self._restate, list(leading), list(earlier), list(new), setting)
        return render_together(restate, self.template_seconds)

    def _restate(
        self,
        leading: list[ChatMessage],
        earlier: list[ChatMessage],
        new: list[ChatMessage],
        setting: _Setting,
    ) -> list[str]:
        before = [*leading, *earlier]
        text = self._render([*before, *new], setting, False)
        other = self._render([*before, _alter(new[0]), *new[1:]], setting, False)
        end = self._find_boundary(text, other, self._render_cached(before, setting))
        first = self._render([*leading, _alter(earlier[0]), *earlier[1:], *new], setting, False)
        alike = count_common(text, first)
        marks = re.compile("|".join(map(re.escape, self.turn_ends)))
        start = max((mark.end() for mark in marks.finditer(text, 0, alike)), default=0)
        cuts = [start, *(mark.end() for mark in marks.finditer(text, start, end))]
        cuts += [end] if cuts[-1] < end else []
        return [text[begin:stop] for begin, stop in pairwise(cuts)]

    @cached_property
    def turn_ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end a turn, or a message of several."""
        channels = self.format.channels
        return self.eos_texts if channels is None else (*self.eos_texts, channels.end)

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """Ids of these tokens."""
        known = self.inner.get_added_vocab()
        channels = self.format.channels
        ends = {known[channels.end]} if channels is not None and channels.end in known else set()
        return frozenset({*self.eos_token_ids, *ends})

    @cached_property
    def rewrites(self) -> bool:
        """True if the template says an answer otherwise once a user's message follows it."""
        if self.format.reasoning is None and self.format.channels is None:
            return False
        asked: list[ChatMessage] = [{"role": "user", "content": "the question"}]
        for reasoning in ("the reason", ""):
            answer = {"role": "assistant", "content": "the answer", "reasoning": reasoning}
            try:
                before = self._render_cached([*asked, answer], _Setting([], {}))
                text = self._render([*asked, answer, *asked], _Setting([], {}), False)
            except BadMessages:
                return True
            if not text.startswith(before):
                return True
            # What a template never says of an answer is in the log all the same.
            if reasoning and reasoning not in text:
                return True
        return False

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a part of a rendering, marks included."""
        return [token for part in text.split(_APART) for token in self.encode(part)]

    def drop_parting(self, text: str) -> str:
        """Return a rendering as its tokens are decoded: without what parts the letters of marks."""
        return text.replace(_APART, "")

    def _encode_prompt(
        self,
        before: list[ChatMessage],
        new: list[ChatMessage],
        setting: _Setting,
        generate: bool,
        opening: str,
    ) -> list[Segment]:
        """Encode messages of others than the assistant, up to where its answer begins or goes on."""
        begun = [{"role": "assistant", "content": opening}] if opening else []

        def render(messages: list[ChatMessage]) -> str:
            return self._render(
                [*before, *messages, *begun], setting, generate, continues=bool(opening)
            )

        text = render(new)
        end = len(text) if generate else _find_end(text, self.eos_texts)
        start = self._find_start(text, self._render_cached(before, setting), [*new, *begun], render)
        return self._encode_segment(text[start:end], recorded=False)

    def _encode_recorded(
        self,
        before: list[ChatMessage],
        new: list[ChatMessage],
        answer: ChatMessage,
        setting: _Setting,
    ) -> list[Segment]:
        """Encode messages and the assistant's answer to them.

        The answer begins after the generation prompt, where the template repeats it in front of an
        answer; otherwise the template's own header belongs to the answer.
        """
        opened = [*before, *new]
        text = self._render([*opened, answer], setting, False)
        asked = self._render(opened, setting, True) if opened else ""

        def render(messages: list[ChatMessage]) -> str:
            return self._render([*before, *messages], setting, False)

        if not text.startswith(asked):
            asked = self._render(opened, setting, False)
            behind = self._find_start(text, asked, [answer], lambda m: render([*new, *m]))
            asked = text[:behind]
        start = self._find_start(
            asked, self._render_cached(before, setting), [*new, answer], render
        )
        end = _find_end(text, self.eos_texts)
        answered = text[len(asked) : end]
        channels = self.format.channels
        if channels is not None and answered.endswith(channels.last):
            answered = answered.removesuffix(channels.last) + channels.end
        return [
            *self._encode_segment(asked[start:], recorded=False),
            *self._encode_segment(answered, recorded=True),
        ]

    def _encode_segment(self, text: str, recorded: bool) -> list[Segment]:
        stretches = text.split(_APART)
        token_ids = tuple(token for stretch in stretches for token in self.encode(stretch))
        return [Segment(token_ids, recorded)] if token_ids else []

    @cached_property
    def _marks(self) -> frozenset[str]:
        """Texts of the tokens that a conversation's form is told by.

        These are the special ones, such as a turn's beginning and end, and those of the vocabulary's
        added tokens that the template itself writes, such as the end of a tool's result.
        """
        frame = f"{self.inner.chat_template} {FRAME if self.writes_tools else ''}"
        texts = {*self.eos_texts, *self.mark_texts.values()}
        for token in self.inner.added_tokens_decoder.values():
            text = str(token)
            if token.special or (text in frame and not text.isalnum()):
                texts.add(text)
        return frozenset(text for text in texts if len(text) > 1 and not text.isspace())

    @cached_property
    def _in_text(self) -> re.Pattern[str]:
        return _match_any(self._marks)

    @cached_property
    def _in_answers(self) -> re.Pattern[str]:
        """The marks that an answer does not have: around its reasoning it has some."""
        return _match_any(self._marks - set(self.format.reasoning or ()))

    def _part_marks(self, message: ChatMessage) -> ChatMessage:
        """Part all marks in the texts of a message, but those around an answer's reasoning."""
        parted: ChatMessage = _part(message, self._in_text)
        if message["role"] == "assistant":
            parted["content"] = _part(message["content"], self._in_answers)
        return parted

    def _render_cached(self, messages: list[ChatMessage], setting: _Setting) -> str:
        """Render the text that is in the cache already."""
        if not messages:
            return ""
        text = self._render(messages, setting, False)
        return text[: _find_end(text, self.eos_texts)]

    def _find_start(
        self,
        text: str,
        known: str,
        new: Sequence[ChatMessage],
        render: Callable[[list[ChatMessage]], str],
    ) -> int:
        """Find where `new` begins in `text`, a rendering of it behind messages that alone are `known`.

        The template may have rewritten these. Then `text` is compared with a rendering of another
        message in the first one's place: they part behind the last end of turn of what is before.
        render: renders messages in the place of `new`.
        """
        if text.startswith(known) or not new:
            return len(known)
        return self._find_boundary(text, render([_alter(new[0]), *new[1:]]), known)

    def _find_boundary(self, text: str, other: str, known: str) -> int:
        """Find the last end of turn before which two renderings are alike."""
        alike = count_common(text, other)
        ends = list(re.finditer("|".join(map(re.escape, self.turn_ends)), text[:alike]))
        if not ends:
            raise BadMessages(
                "the chat template renders the earlier messages differently when new ones follow"
            )
        # Where no token ends a turn, the mark is the next one's beginning.
        is_end = known.rstrip().endswith(self.turn_ends)
        return ends[-1].end() if is_end else ends[-1].start()

    def _render(
        self,
        messages: list[ChatMessage],
        setting: _Setting,
        prompt: bool,
        *,
        continues: bool = False,
    ) -> str:
        """Render messages; `continues`: up to the last one's text, which goes on."""
        try:
            named = write_ids(messages, self.format.call_ids)
            if self.format.channels is not None:
                named = split_calls(named)
            rendered = [self._part_marks(_to_template(m, self.text_arguments)) for m in named]
            tools = _part(setting.tools, self._in_text)
            if self.writes_tools:
                rendered = write_tools(rendered, tools)
            text = self.inner.apply_chat_template(
                rendered,
                tools=None if self.writes_tools else tools or None,
                add_generation_prompt=prompt and not continues,
                continue_final_message=continues,
                tokenize=False,
                **_part(setting.arguments, self._in_text),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadMessages(f"the chat template refuses the messages: {error}") from error
        assert isinstance(text, str), "tokenize=False renders text"
        return text


def load_tokenizer(name: str | Path, eos_token_ids: Sequence[int]) -> ChatTokenizer:
    """Load a model's tokenizer by path or hub name.

    Raises ModelRefused without a fast tokenizer, a chat template or an end-of-turn token.
    """
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
        eos.insert(0, inner.eos_token_id)  # first: a truncated answer is ended with it
    if not eos:
        raise ModelRefused(
            f"{name} has no end-of-turn token: neither its tokenizer nor its model names one"
        )
    try:
        with limit_seconds(_LOAD_SECONDS):
            tokenizer = ChatTokenizer(inner, tuple(eos))
    except DeadlinePassed as error:
        raise ModelRefused(f"{name} has a chat template that does not end") from error
    if tokenizer.writes_tools:
        _log.info(
            "the chat template has no tools", model=str(name), effect="written in Hermes' form"
        )
    elif not tokenizer.format.mark:
        _log.warning("the form of tool calls is not known", model=str(name), effect="text only")
    return tokenizer


def keep_recent(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Select the messages that rendering the next ones needs.

    These are a leading system message, the last user's, and all since the assistant's last if it is
    later. Templates look at these: what the conversation begins with, the user's message that
    is being answered, the call that a result belongs to, the result that another one follows.
    """
    last = {message["role"]: index for index, message in enumerate(messages)}
    user = last.get("user", 0)
    leading = {0} if messages and messages[0]["role"] in ("system", "developer") else set()
    asked = {user} if "user" in last else set()
    rest = range(max(user, last.get("assistant", 0)), len(messages))
    return [messages[index] for index in sorted(leading | asked | set(rest))]


def _to_template(message: ChatMessage, text_arguments: bool) -> ChatMessage:
    """Convert a message to the form that chat templates expect.

    The arguments of a call are an object there, unless they are JSON text; the content is a string.
    The reasoning has all names that templates read it by.
    """
    rendered = {**message, "content": message.get("content") or ""}
    if reasoning := rendered.pop("reasoning", ""):
        rendered |= dict.fromkeys(_REASONING_NAMES, reasoning)
    if message.get("tool_calls"):
        rendered["tool_calls"] = [
            _to_template_call(call, text_arguments) for call in message["tool_calls"]
        ]
    return rendered


def _to_template_call(call: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = _to_object(function["arguments"])
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of the texts, the longest first; some vocabularies have thousands of marks."""
    return re.compile(_write_tree(sorted(texts)) or "(?!)")


def _write_tree(texts: Sequence[str]) -> str:
    """Write the pattern of sorted texts: it looks at a letter once, however many begin with it."""
    rest = [text for text in texts if text]
    branches = [
        re.escape(first) + _write_tree([text[1:] for text in same])
        for first, same in groupby(rest, key=lambda text: text[0])
    ]
    tree = f"(?:{'|'.join(branches)})" if branches else ""
    return f"{tree}?" if tree and len(rest) < len(texts) else tree


def _part(value: Any, marks: re.Pattern[str]) -> Any:
    """Part the marks in all strings of a value, members' names included: there they are plain text."""
    if isinstance(value, str):
        return marks.sub(
            lambda found: f"{found[0][0]}{_APART}{found[0][1:]}", value.replace(_APART, "")
        )
    if isinstance(value, Mapping):
        return {_part(name, marks): _part(each, marks) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_part(each, marks) for each in value]
    return value


def _alter(message: ChatMessage) -> ChatMessage:
    """Return a message that says something else from its beginning on, in the same parts."""

    def alter(text: str) -> str:
        return f"{'1' if text[:1] == '0' else '0'}{text}"

    altered = {**message}
    for name in ("content", "reasoning"):
        if message.get(name) or (name == "content" and not message.get("tool_calls")):
            altered[name] = alter(message.get(name) or "")
    if message.get("tool_calls"):
        call, *rest = message["tool_calls"]
        function = {**call["function"], "name": alter(call["function"]["name"])}
        altered["tool_calls"] = [{**call, "function": function}, *rest]
    return altered


def _to_object(arguments: str | dict[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        # Those of a call that was cut off, as far as they go: templates walk over an object.
        return from_json(replace_in_json(arguments), allow_partial="trailing-strings")
    except ValueError:
        return arguments


def _find_end(text: str, eos_texts: Sequence[str]) -> int:
    """Find the end of a rendering's last turn: after its end-of-turn token, before white space.

    A generated turn ends with that token and nothing else; a recorded one is truncated to the same.
    """
    last = max((at + len(eos) for eos in eos_texts if (at := text.rfind(eos)) >= 0), default=-1)
    return last if last >= 0 and not text[last:].strip() else len(text)
