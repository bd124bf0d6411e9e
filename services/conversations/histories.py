"""Whole conversations as clients repeat them: one canonical form, and a digest after each message.

Clients that keep no session send everything said so far with every request, each in its own
clothes: content as null, as text or in parts, arguments with other spaces, calls under other ids.
What has the same canonical form is the same conversation. The digests are keyed by the tenant, the
salt and all that the tokens depend on, so a request finds no other tenant's session, and none with
another salt, other tools or settings.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise, takewhile
from math import isfinite
from typing import Any

from kvrecall.domain.errors import CallsOutstanding, DuplicateCall, ToolResultWithoutCall
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.tolerance.ignored import Ignored
from kvrecall.domain.tolerance.surrogates import replace_in_json
from services.conversations.mending import Placed, mend_order

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class History:
    """A conversation in order: the results of a message's calls follow it, in the calls' order.

    `start` is the digest of all that comes before its messages. Build one with `build_history`.
    `ignored`: what was mended in it.
    """

    start: bytes
    messages: tuple[Message, ...]
    ignored: tuple[Ignored, ...] = ()

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """The digest of the start, then of everything up to each message."""
        digests = [self.start]
        for message, place in zip(self.messages, _get_places(self.messages), strict=True):
            digests.append(extend(digests[-1], message, place))
        return tuple(digests)

    @property
    def ends(self) -> list[int]:
        """The numbers of messages after which a turn may have ended, the latest first."""
        replies = [
            number
            for number, message in enumerate(self.messages, 1)
            if message.role == "assistant" and number < len(self.messages)
        ]
        return replies[::-1]

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The first message and the end of each turn: a history is cut behind its answers."""
        cuts = [0, *self.ends[::-1], len(self.messages)]
        return list(pairwise(cuts))


def begin(scope: bytes) -> bytes:
    """Return the digest of a conversation without a message: of what else its tokens depend on."""
    return _digest(scope)


def build_history(
    start: bytes,
    messages: Sequence[Message],
    asked: Sequence[ToolCall] = (),
    hidden: int = 0,
    mend: bool = False,
) -> History:
    """Build a history from a client's messages, with the results of calls in the calls' order.

    `asked` are the calls that the message before them ended on; the first `hidden` messages are
    not of this request, so that errors name the place in it. Calls without text belong to the answer
    before them. With `mend` calls and results are made to fit; without, raises
    ToolResultWithoutCall, CallsOutstanding and DuplicateCall: each call is answered once, before the
    next other message.
    """
    placed = _join_calls([Placed(index, each) for index, each in enumerate(messages, -hidden)])
    if mend:
        mended = mend_order(placed, asked)
        return History(start, tuple(map(_drop_name, mended.messages)), mended.ignored)
    return History(start, tuple(map(_drop_name, _order(placed, asked))))


def _drop_name(message: Message) -> Message:
    """Drop a name that is not in the canonical form, so that no template renders it."""
    named = message.name and message.role != "user"
    return replace(message, name="") if named else message


def _join_calls(messages: Sequence[Placed]) -> list[Placed]:
    """Join calls without text to the answer before them: some clients send both apart."""
    joined: list[Placed] = []
    for each in messages:
        message = each.message
        before = joined[-1] if joined else None
        if (
            before is not None
            and message.role == before.message.role == "assistant"
            and message.tool_calls
            and not message.content
        ):
            calls = (*before.message.tool_calls, *message.tool_calls)
            reasoning = before.message.reasoning or message.reasoning
            whole = replace(before.message, tool_calls=calls, reasoning=reasoning)
            joined[-1] = replace(before, message=whole)
        else:
            joined.append(each)
    return joined


def _order(messages: Sequence[Placed], asked: Sequence[ToolCall]) -> Iterator[Message]:
    """Yield messages with the results of calls in the calls' order. Raises as `build_history`."""
    calls = {call.id: call for call in asked}
    results: dict[str, Message] = {}
    for placed in messages:
        message = placed.message
        if message.role == "tool":
            _require_call(placed.index, message, calls, results)
            results[message.tool_call_id] = message
            continue
        yield from _take_results(calls, results)
        yield message
        calls = {call.id: call for call in message.tool_calls}
        if len(calls) < len(message.tool_calls):
            raise DuplicateCall(
                f"messages[{placed.index}].tool_calls",
                "two tool calls of one message have the same id",
            )
        results = {}
    yield from _take_results(calls, results)


def extend(digest: bytes, message: Message, place: int = -1) -> bytes:
    """Return the digest of a conversation with one more message.

    `place`: the position of the call that a tool's result answers, in the message before.
    """
    return _digest(digest + _canonical(message, place))


def rename_calls(messages: Sequence[Message], calls: Sequence[ToolCall]) -> tuple[Message, ...]:
    """Return the messages with the leading results under the ids that the session gave its calls.

    They answer `calls` in order, whatever ids the client made of those.
    """
    results = list(takewhile(lambda message: message.role == "tool", messages))
    renamed = [
        replace(result, tool_call_id=call.id) for result, call in zip(results, calls, strict=False)
    ]
    return (*renamed, *messages[len(renamed) :])


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _canonical(message: Message, place: int) -> bytes:
    """Return a message without what differs between clients: ids, spaces in arguments, names.

    An answer has no white space at its end: a client that put it together from a stream may have
    kept some. That at its beginning may be the indentation of code. Only users have names here.
    """
    is_reply = message.role == "assistant"
    parts = [
        message.role,
        message.content.rstrip() if is_reply else message.content,
        str(place),
        message.name if message.role == "user" else "",
    ]
    for call in message.tool_calls:
        parts += (call.name, canonical_json(call.arguments))
    # Lengths before texts: no two messages have the same bytes. JSON would take five times longer.
    lengths = ",".join([str(len(part)) for part in parts])
    return "".join((lengths, "\n", *parts)).encode(errors="surrogatepass")


def canonical_json(text: str) -> str:
    """Return a JSON text without what differs between writers; any other text as it is.

    Writers choose spaces, escapes, the order of members and the notation of a number. A text with
    two members of one name, or with a number that a double does not hold exactly, is any other text:
    read as a value it would be equal to a different one.
    """
    try:
        value = json.loads(
            replace_in_json(text),
            object_pairs_hook=_read_object,
            parse_float=_read_float,
            parse_int=_read_int,
        )
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, ArithmeticError, RecursionError):
        return text


def _read_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for two members of one name."""
    read = dict(members)
    if len(read) < len(members):
        raise ValueError("two members of an object have the same name")
    return read


def _read_float(text: str) -> float:
    """Return a number. Raises ValueError, ArithmeticError for one that a double does not hold."""
    value = float(text)
    if not isfinite(value) or Decimal(text) != Decimal(repr(value)):
        raise ValueError("a number has more digits, or is greater, than a double can hold")
    return value


def _read_int(text: str) -> int:
    """Return an integer. Raises ValueError for a zero with a sign, and for too many digits."""
    if text == "-0":
        raise ValueError("an integer has no negative zero")
    return int(text)


def _get_places(messages: Sequence[Message]) -> Iterator[int]:
    place = -1
    for message in messages:
        place = place + 1 if message.role == "tool" else -1
        yield place


def _take_results(calls: dict[str, ToolCall], results: dict[str, Message]) -> list[Message]:
    missing = [id for id in calls if id not in results]
    if missing:
        raise CallsOutstanding(missing)
    return [results[id] for id in calls]


def _require_call(
    index: int, result: Message, calls: dict[str, ToolCall], results: dict[str, Message]
) -> None:
    id = result.tool_call_id
    if id not in calls or id in results:
        raise ToolResultWithoutCall(
            f"messages[{index}].tool_call_id",
            f"no tool call {id!r} waits for a result here",
            call=id,
        )
