"""OpenAI's responses and conversations of a session as records of an archive.

The response to a turn is found by the name that it has in the session. It is imported under that
name, which clients hold, also where its session has another one. Digests of histories are not part
of a file: they are those of one catalog, and what they save is computed again.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from gateway.openai.responses.ids import TurnName
from kvrecall.domain.errors import UnknownConversation, UnknownResponse
from kvrecall.domain.sessions.session import Session
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.app.errors import BadSessionFile
from services.catalog.base import Catalog
from services.catalog.responses import (
    StoredConversation,
    StoredItem,
    StoredResponse,
    drop_origin,
    name_origin,
)

RESPONSE = TypeAdapter(StoredResponse)
CONVERSATION = TypeAdapter(StoredConversation)
ITEMS = TypeAdapter(tuple[StoredItem, ...])

_ITEMS_AT_ONCE = 256


@dataclass(frozen=True)
class Answers:
    """Responses that turns of a session gave, and the conversations that they were added to."""

    responses: tuple[StoredResponse, ...] = ()
    conversations: tuple[tuple[StoredConversation, tuple[StoredItem, ...]], ...] = ()


async def dump_answers(catalog: Catalog, session: Session) -> Answers:
    """Read the responses of a session that can still be read, with their conversations."""
    tenant = session.settings.tenant
    responses = []
    for turn in range(1, session.turns + 1):
        with suppress(UnknownResponse):
            name = TurnName(session.id, turn).response
            found = await catalog.responses.get(name, tenant)
            responses.append(replace(found, opening=name_origin(found.opening, catalog.id)))
    names = dict.fromkeys(_get_conversation(response) for response in responses)
    conversations = []
    for name in names:
        with suppress(UnknownConversation):
            conversation = await catalog.conversations.get(name, tenant)
            conversations.append((conversation, await _read_items(catalog, name)))
    return Answers(tuple(responses), tuple(conversations))


def to_answer_records(answers: Answers) -> Iterator[Record]:
    """Convert to records."""
    for response in answers.responses:
        yield Record(RecordKind.RESPONSE, asdict(response))
    for conversation, items in answers.conversations:
        value = CONVERSATION.dump_python(conversation, mode="json")
        yield Record(RecordKind.CONVERSATION, value, ITEMS.dump_json(items))


def from_answer_records(records: Iterable[Record], session: Session) -> Answers:
    """Convert from the records of a file, of which others are not read.

    What a file says of another tenant is that of the session. Raises BadSessionFile.
    """
    tenant = session.settings.tenant
    responses = []
    conversations = []
    try:
        for record in records:
            if record.kind is RecordKind.RESPONSE:
                response = RESPONSE.validate_python(record.value)
                responses.append(replace(response, session=session.id, tenant=tenant))
            elif record.kind is RecordKind.CONVERSATION:
                conversation = CONVERSATION.validate_python(record.value)
                items = ITEMS.validate_json(record.data)
                conversations.append((replace(conversation, tenant=tenant), items))
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        raise BadSessionFile(
            f"the file has a response that this kvrecall does not know: {error}"
        ) from error
    return Answers(tuple(responses), tuple(conversations))


async def restore_answers(catalog: Catalog, answers: Answers, seconds: float) -> Answers:
    """Store what the catalog does not have yet, responses for `seconds`; return what was stored."""
    responses = []
    for response in answers.responses:
        try:
            await catalog.responses.get(response.id, response.tenant)
        except UnknownResponse:
            own = replace(response, opening=drop_origin(response.opening, catalog.id))
            await catalog.responses.store(own, seconds)
            responses.append(own)
    conversations = []
    for conversation, items in answers.conversations:
        try:
            await catalog.conversations.get(conversation.id, conversation.tenant)
        except UnknownConversation:
            await catalog.conversations.create(conversation, items)
            conversations.append((conversation, items))
    return Answers(tuple(responses), tuple(conversations))


def describe(answers: Answers) -> str:
    """Return how many there are, for people; empty if there is none."""
    counts = (("response", answers.responses), ("conversation", answers.conversations))
    parts = [f"{len(some)} {name}{'s' * (len(some) > 1)}" for name, some in counts if some]
    return ", ".join(parts)


def _get_conversation(response: StoredResponse) -> str:
    """Return the id of the conversation that a response was added to; empty if there is none."""
    named = json.loads(response.body).get("conversation")
    return str(named["id"]) if isinstance(named, dict) else ""


async def _read_items(catalog: Catalog, conversation: str) -> tuple[StoredItem, ...]:
    items: list[StoredItem] = []
    after = None
    while found := await _read_some(catalog, conversation, after):
        items += found
        after = found[-1].id
    return tuple(items)


async def _read_some(
    catalog: Catalog, conversation: str, after: str | None
) -> Sequence[StoredItem]:
    return await catalog.conversations.get_items(conversation, after, _ITEMS_AT_ONCE, False)
