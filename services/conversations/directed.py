"""Conversations whose client says where they go on: in a session that it names, or in none that stays."""

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrecall.domain.errors import ServiceError, SessionMismatch
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.session import Session
from services.catalog.base import Catalog
from services.conversations.continuation import Continuation, Conversation
from services.conversations.histories import History, begin, build_history, canonical_json, extend
from services.conversations.responses import RecordedStream, read_said

if TYPE_CHECKING:
    from services.conversations.matching import Conversations

# A session that is to be deleted behind its answer goes after this time, if the process is killed.
_LEFT_SECONDS = 60.0


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


async def start(
    conversations: "Conversations",
    delete: Callable[[str], Awaitable[None]],
    conversation: Conversation,
    direction: Direction,
) -> Continuation:
    """Start a conversation's turn where it is directed to. Raises as the methods of Conversations."""
    if direction.session:
        return await conversations.turn_in(direction.session, conversation, direction.only_new)
    if not direction.alone:
        return await conversations.turn(conversation)
    settings = replace(conversation.settings, expires_after_seconds=_LEFT_SECONDS)
    # A repeated request finds nothing any more: it is answered anew.
    found = await conversations.turn_alone(replace(conversation, settings=settings, key=None))

    async def forget() -> None:
        with suppress(ServiceError):
            await delete(found.session)

    return replace(found, stream=RecordedStream(found.stream, _record_nothing, forget))


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
        return build_history(place, messages, [call.call for call in session.calls])
    said = await read_said(catalog, limits, session.id, session.turns)
    history = build_history(place, messages)
    count = len(said)
    if len(history.messages) <= count or history.digests[count] != _digest(place, said):
        message = (
            f"session {session.id!r} holds {count} messages, which do not all come before others in "
            "this request; send the whole conversation, or with kvrecall-history: new what is new"
        )
        raise SessionMismatch(message, session=session.id)
    return History(history.digests[count], history.messages[count:])


def _digest(start: bytes, said: Sequence[Message]) -> bytes:
    """Return the digest of what was said, of which the last calls may still wait for results."""
    if not said or said[-1].role != "assistant":
        return build_history(start, said).digests[-1]
    return extend(build_history(start, said[:-1]).digests[-1], said[-1])


def _canonical(tools: Sequence[str]) -> list[str]:
    return sorted(canonical_json(tool) for tool in tools)


async def _record_nothing(outcome: TurnOutcome) -> None:
    return None
