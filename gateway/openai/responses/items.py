"""Items of the Responses API, and the messages that they stand for.

Neighbouring text, reasoning and calls of an assistant are one message, as chat completions say it,
so both APIs find the same session.

Some items of a history are made by OpenAI's service alone. A call that was run there comes with
what it gave, so it becomes text within the answer, and no call of the client's waits for it. What
tells the model nothing is left out.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from gateway.conversation.bodies import Wire
from gateway.conversation.ignored import Tolerance
from gateway.openai.chat_messages import ROLES
from gateway.openai.parts import is_text, join_parts
from gateway.openai.responses.calls import (
    OUTPUTS,
    ApplyPatchCallItem,
    ApplyPatchOutputItem,
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    OutputItem,
    ResultItem,
    ShellCallItem,
    ShellOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    build_call,
    build_output,
    get_kind,
)
from gateway.openai.responses.compaction import tell_compaction
from gateway.openai.responses.ids import ItemPlace, Side, TurnName
from gateway.openai.responses.objects import is_committed
from gateway.openai.responses.tools import Toolbox, place_tools
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Turn
from services.catalog.responses import StoredResponse
from services.service import SessionService

Json = dict[str, Any]

SETTING_ITEMS = frozenset({"additional_tools", "configuration_update"})
"""Types of items that are read before the turn (`ResponseBody`), and say nothing."""

LEFT_OUT_ITEMS = frozenset({"mcp_approval_request", "mcp_approval_response", "mcp_list_tools"})
"""Types of items that have no effect."""

_SCREENSHOT = "[a screenshot, which this model cannot see]"
_TURNS_PER_READ = 32


class HostedItem(Wire):
    """Item that no client makes by itself; its members are kept for the prompt."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def message(self) -> Message | None:
        """The message of the prompt; None for an item that is left out."""
        tell = _TELLERS.get(self.type)
        return None if tell is None else tell(self.type, self.model_extra or {})


def _tell(*names: str) -> Callable[[str, Json], Message]:
    """Return the function that tells these members of a call that was run."""

    def tell(kind: str, item: Json) -> Message:
        found = {name: item[name] for name in names if item.get(name)}
        text = json.dumps(found, ensure_ascii=False)
        return Message("assistant", f"[{kind} {text}]\n")

    return tell


def _tell_code(kind: str, item: Json) -> Message:
    outputs = item.get("outputs") or ()
    logs = [str(each["logs"]) for each in outputs if isinstance(each, dict) and each.get("logs")]
    return _tell("code", "logs")(kind, {"code": item.get("code"), "logs": "\n".join(logs)})


def _tell_screenshot(kind: str, item: Json) -> Message:
    return Message("user", _SCREENSHOT)


def _tell_compaction(kind: str, item: Json) -> Message:
    return tell_compaction(item.get("encrypted_content"))


def _tell_agent(kind: str, item: Json) -> Message:
    """Tell what another agent said, as Codex passes it on."""
    parts = item.get("content") or ()
    texts = [part.get("text") or "" for part in parts if isinstance(part, dict)]
    return Message("user", f"Message from {item.get('author')}: {''.join(texts)}")


_TELLERS: Mapping[str, Callable[[str, Json], Message]] = {
    "agent_message": _tell_agent,
    "code_interpreter_call": _tell_code,
    "compaction": _tell_compaction,
    "compaction_summary": _tell_compaction,
    "computer_call": _tell("action", "actions"),
    "computer_call_output": _tell_screenshot,
    "file_search_call": _tell("queries", "results"),
    "image_generation_call": _tell("revised_prompt"),
    "mcp_call": _tell("server_label", "name", "arguments", "output", "error"),
    "program": _tell("code"),
    "program_output": _tell("result"),
    "web_search_call": _tell("action"),
}

HOSTED_ITEMS = SETTING_ITEMS | LEFT_OUT_ITEMS | _TELLERS.keys()
"""Types of all items that no client makes by itself."""


class MessageItem(Wire):
    """Message; its content is text or parts."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json] | None = None


class ReasoningItem(Wire):
    """Reasoning of an answer, as far as it is not encrypted. The chat template may drop it."""

    summary: list[Json] | None = None
    content: list[Json] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning as text; of one without a content its summary says nothing."""
        return "".join(str(part.get("text") or "") for part in self.content or ())


Item = MessageItem | CallItem | ResultItem | ReasoningItem | HostedItem
_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "shell_call": ShellCallItem,
    "shell_call_output": ShellOutputItem,
    "local_shell_call": LocalShellCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "apply_patch_call": ApplyPatchCallItem,
    "apply_patch_call_output": ApplyPatchOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "reasoning": ReasoningItem,
    **dict.fromkeys(HOSTED_ITEMS, HostedItem),
}


@dataclass(frozen=True)
class PlacedItem:
    """An item, its type, and where in the request it stands; `sent`: as the client wrote it."""

    item: Item
    kind: str
    field: str
    sent: Json


@dataclass(frozen=True)
class Messages:
    """The messages that items stand for, and where in the request each begins."""

    messages: tuple[Message, ...]
    fields: tuple[str, ...]


def is_needed(item: Json) -> bool:
    """Return whether a conversation would be another one without an item.

    It is not with a type that nobody knows here, and with a reference to reasoning, which is not
    read.
    """
    kind, id = item.get("type"), item.get("id")
    if kind == "item_reference":
        return not (isinstance(id, str) and id.startswith("rs_"))
    return kind is None or kind in (*_KINDS, "compaction_trigger")


def is_left_out(placed: PlacedItem) -> bool:
    """Return whether an item has no effect."""
    return placed.kind in LEFT_OUT_ITEMS


def parse_item(item: Json, field: str, tolerance: Tolerance) -> PlacedItem:
    """Check an item; its parts become text. Raises InvalidRequest with its place."""
    kind = item.get("type") or "message"
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        message = f"items of type {kind!r} are not supported"
        raise InvalidRequest(f"{field}.type", message, openai_code="unsupported_content")
    try:
        parsed = known.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        raise InvalidRequest(f"{field}{path}", first["msg"]) from error
    return PlacedItem(_read_parts(parsed, field, tolerance), kind, field, item)


def _read_parts(item: Item, field: str, tolerance: Tolerance) -> Item:
    """Return an item whose parts are text: words where one has none. Raises InvalidRequest."""
    match item:
        case MessageItem(content=list() as content):
            parts = _read_list(content, f"{field}.content", tolerance)
            return item.model_copy(update={"content": parts})
        case OutputItem(output=list() as output):
            parts = _read_list(output, f"{field}.output", tolerance)
            return item.model_copy(update={"output": parts})
    return item


def _read_list(parts: list[Json], field: str, tolerance: Tolerance) -> list[Json]:
    """Return parts of text: the same ones, or one with words for those that are none."""
    text = join_parts(parts, field, tolerance)
    if all(is_text(part) for part in parts):
        return parts
    return [{"type": "text", "text": text}]


def to_messages(items: Sequence[PlacedItem]) -> Messages:
    """Convert items to messages, in order."""
    messages: list[Message] = []
    fields: list[str] = []
    answering = False  # the last message is an answer that goes on
    thought = ""  # of the answer that follows
    for placed in items:
        message = _to_message(placed)
        if message is None:
            thought += placed.item.text if isinstance(placed.item, ReasoningItem) else ""
            continue
        if message.role == "assistant":
            message = replace(message, reasoning=thought)
        thought = ""
        if answering and message.role == "assistant":
            before = messages[-1]
            messages[-1] = replace(
                before,
                content=before.content + message.content,
                tool_calls=(*before.tool_calls, *message.tool_calls),
                reasoning="\n\n".join(filter(None, (before.reasoning, message.reasoning))),
            )
        else:
            messages.append(message)
            fields.append(placed.field)
        answering = message.role == "assistant"
    return Messages(tuple(messages), tuple(fields))


def to_item(placed: PlacedItem, id: str) -> Json:
    """Convert an item that a client sent to the form in which it is read again."""
    item = placed.item
    match item:
        case MessageItem():
            return _build_message(item.role, _to_parts(item), id)
        case OutputItem():
            return build_output(placed.kind, item.call_id, _get_text(placed), id)
        case ReasoningItem():
            known = item.model_dump(exclude_none=True)
            return {"id": id, "type": "reasoning", "summary": [], **known}
        case _:
            return {"status": "completed", **placed.sent, "id": id, "type": placed.kind}


def read_turn(
    turn: Turn, toolbox: Toolbox, before: Turn | None, hidden: int = 0, answer: bool = True
) -> list[Json]:
    """Return the items of a committed turn: its input but for the `hidden` first, and its answer.

    `toolbox` and the turn before tell the types of its calls and of their outputs.
    """
    earlier = None if before is None else before.outcome.message
    messages = turn.messages if earlier is None else (earlier, *turn.messages)
    kinds = {
        call.id: get_kind(call, toolbox) for message in messages for call in message.tool_calls
    }
    asked = [item for message in turn.messages for item in _split(message, toolbox, kinds)]
    items = _name_items(turn, "i", asked)[hidden:]
    if answer and turn.outcome.message is not None:
        items += _name_items(turn, "o", list(_split(turn.outcome.message, toolbox, kinds)))
    return items


def build_answer(
    text: str, id: str, status: str = "completed", logprobs: Sequence[Json] = ()
) -> Json:
    """Build the item of an answer's text."""
    return _build_message("assistant", [build_text(text, logprobs)], id, status)


def build_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Build the part of a text that the model generated."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def build_reasoning(text: str, id: str, status: str = "completed") -> Json:
    """Build the item of what the model reasoned before an answer."""
    return {
        "id": id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def _name_items(turn: Turn, side: Side, items: Sequence[Json]) -> list[Json]:
    name = TurnName(turn.session, turn.number)
    return [
        item | {"id": name.item(item["type"], side, number)} for number, item in enumerate(items)
    ]


def _build_message(role: str, content: list[Json], id: str, status: str = "completed") -> Json:
    return {"id": id, "type": "message", "status": status, "role": role, "content": content}


def _to_message(placed: PlacedItem) -> Message | None:
    item = placed.item
    match item:
        case MessageItem():
            return Message(ROLES.get(item.role, item.role), _get_text(placed))
        case ReasoningItem():
            return None
        case HostedItem():
            return item.message
    if isinstance(item, CallItem):
        return Message("assistant", tool_calls=(item.call,))
    return Message("tool", _get_text(placed), tool_call_id=item.call_id)


def _get_text(placed: PlacedItem) -> str:
    """Return the text of an item, whose parts are text."""
    content = placed.item.content if isinstance(placed.item, MessageItem | ResultItem) else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    return content or ""


def _to_parts(item: MessageItem) -> list[Json]:
    """Return the parts of a message; a refusal stays one."""
    content = item.content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else _build_part(item.role, part["text"])
        for part in parts
    ]


def _build_part(role: str, text: str) -> Json:
    return build_text(text) if role == "assistant" else {"type": "input_text", "text": text}


def _split(message: Message, toolbox: Toolbox, kinds: Mapping[str, str]) -> Iterable[Json]:
    """Yield the items that a message stands for, without ids; `kinds`: of calls by their ids."""
    if message.role == "tool":
        kind = OUTPUTS[kinds.get(message.tool_call_id, "function_call")]
        yield build_output(kind, message.tool_call_id, message.content, "")
        return
    if message.reasoning:
        yield build_reasoning(message.reasoning, "")
    if message.content or not message.tool_calls:
        yield _build_message(message.role, [_build_part(message.role, message.content)], "")
    for call in message.tool_calls:
        yield build_call(call, toolbox, "")


async def read_input_items(
    service: SessionService,
    response: StoredResponse,
    after: str | None,
    limit: int,
    newest_first: bool,
) -> list[Json]:
    """Return up to `limit` items that follow the item `after` in this order.

    They are all of the conversation up to the response, but for its instructions: it reads only the
    turns that the page is of. Raises InvalidRequest for an unknown `after`.
    """
    items: list[Json] = []
    body = json.loads(response.body)
    toolbox = place_tools(body["tools"])
    waiting = after is not None
    # The turn of a response that has not ended, or not well, is not in the log or is another's.
    last = response.turn - (not is_committed(body))
    turn = _get_first_turn(response, last, after, newest_first)
    while len(items) < limit and 1 <= turn <= last:
        first = max(1, turn - _TURNS_PER_READ + 1) if newest_first else turn
        count = turn - first + 1 if newest_first else _TURNS_PER_READ
        after_turn = max(0, first - 2)  # calls of the turn before tell the types of its outputs
        more = min(count, last - first + 1) + first - 1 - after_turn
        turns = await service.responses.get_turns(response, after_turn, more)
        found = _read(turns, first, response, toolbox)
        if newest_first:
            found.reverse()
        if waiting:
            ids = [item["id"] for item in found]
            if after not in ids:
                break
            found = found[ids.index(after) + 1 :]
            waiting = False
        items += found
        turn = first - 1 if newest_first else turn + _TURNS_PER_READ
    if waiting:
        raise InvalidRequest("after", f"there is no item {after!r}")
    return items[:limit]


def _get_first_turn(
    response: StoredResponse, last: int, after: str | None, newest_first: bool
) -> int:
    """Return the turn to begin at. Raises InvalidRequest."""
    if after is None:
        return last if newest_first else 1
    place = ItemPlace.parse(after)
    if place is None or place.name.session != response.session:
        raise InvalidRequest("after", f"there is no item {after!r}")
    return place.name.turn


def _read(
    turns: Sequence[Turn], first: int, response: StoredResponse, toolbox: Toolbox
) -> list[Json]:
    """Return the items of turns from number `first` on, without the response's own answer."""
    items: list[Json] = []
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn.number >= first:
            hidden = response.hidden if turn.number == 1 else 0
            answered = turn.number < response.turn
            items += read_turn(turn, toolbox, before, hidden, answered)
    return items
