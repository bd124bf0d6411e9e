"""Request bodies of conversations."""

from typing import Annotated, Any

from pydantic import Field

from gateway.conversation_bodies import MAX_MESSAGES, Wire
from gateway.openai.responses.schemas import Metadata

Json = dict[str, Any]
Items = Annotated[list[Json], Field(max_length=MAX_MESSAGES)]


class ConversationBody(Wire):
    """Body of POST /v1/conversations: its metadata and first items."""

    metadata: Metadata | None = None
    items: Items | None = None


class MetadataBody(Wire):
    """Body of POST /v1/conversations/{conversation}: other metadata."""

    metadata: Metadata | None


class ItemsBody(Wire):
    """Body of POST /v1/conversations/{conversation}/items: items to append."""

    items: Items = Field(min_length=1)
