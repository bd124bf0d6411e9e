"""Directions of a client where its conversation goes on, and what is new to a session that it names."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.domain.errors import SessionMismatch
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session
from services.catalog.base import Catalog
from services.conversations.continuation import Conversation
from services.conversations.histories import History, begin, build_history, canonical_json, extend
from services.conversations.responses import read_messages


@dataclass(frozen=True)
class Direction:
    """Where a conversation goes on; by default where its history is found.

    - `session`: the id of a session that holds all but what is new; empty: it is looked for.
    - `only_new`: the messages are those that follow what the session holds.
    - `alone`: in a session of its own, which no other request finds and which is deleted behind the
      answer.
    """

    session: str = ""
    only_new: bool = False
    alone: bool = False


async def read_new(
    catalog: Catalog,
    limits: ServiceLimits,
    session: Session,
    conversation: Conversation,
    only_new: bool,
) -> History:
    """Return what of a conversation is new to a session that the client names.

    Raises SessionMismatch unless all that the session holds comes before it.
    """
    tools = conversation.settings.tools
    if tools and _canonical(tools) != _canonical(session.settings.tools):
        raise SessionMismatch(f"session {session.id!r} has other tools", session=session.id)
    # A digest of its own: no history of messages alone leads to this session.
    place = begin(json.dumps([catalog.id, session.id, session.turns]).encode())
    messages = (*conversation.opening, *conversation.messages)
    if only_new:
        calls = [call.call for call in session.calls]
        # What is new is the client's own step: a result that is missing is still awaited.
        return build_history(place, messages, calls)
    held = await read_messages(catalog, limits, session.id, session.turns)
    history = build_history(place, messages, mend=limits.mends)
    count = len(held)
    if len(history.messages) <= count or history.digests[count] != _digest(place, held):
        message = (
            f"session {session.id!r} holds {count} messages, which do not all come before others in "
            "this request; send the whole conversation, or with kvrecall-history: new what is new"
        )
        raise SessionMismatch(message, session=session.id)
    return History(history.digests[count], history.messages[count:], history.ignored)


def _digest(start: bytes, held: Sequence[Message]) -> bytes:
    """Return the digest of messages of which the last calls may still wait for results."""
    if not held or held[-1].role != "assistant":
        return build_history(start, held).digests[-1]
    return extend(build_history(start, held[:-1]).digests[-1], held[-1])


def _canonical(tools: Sequence[str]) -> list[str]:
    return sorted(canonical_json(tool) for tool in tools)
