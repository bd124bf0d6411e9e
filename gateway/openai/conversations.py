"""Routes of OpenAI's Conversations API."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.conversation.bodies import MAX_MESSAGES, Wire
from gateway.conversation.ignored import IgnoredParts, Tolerance
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.tenants import Tenant
from gateway.openai.pages import After, Limit, Order, build_page
from gateway.openai.responses.ids import draw_item_id
from gateway.openai.responses.items import parse_item, to_item
from gateway.openai.responses.schemas import Metadata
from kvrecall.domain.errors import InvalidRequest, UnknownItem
from services.catalog.responses import StoredConversation, StoredItem
from services.service import SessionService

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


def add_conversation_routes(router: APIRouter, service: SessionService) -> None:
    """Add the routes of conversations."""
    _add_conversations(router, service)
    _add_items(router, service)


def _add_conversations(router: APIRouter, service: SessionService) -> None:
    conversations = service.named_conversations

    @router.post("/conversations", tags=["openai"])
    async def create_conversation(
        request: Request,
        body: ConversationBody = ConversationBody(),
        key: Key = None,
        tenant: Tenant = "",
    ) -> Json:
        """Create a conversation, to which responses that name it add their items."""
        items = _build_items(body.items or (), service)
        idempotency = get_idempotency_key(request, key, body)
        metadata = body.metadata or {}
        return _describe(await conversations.create(tenant, metadata, items, idempotency))

    @router.get("/conversations/{conversation}", tags=["openai"])
    async def get_conversation(conversation: str, tenant: Tenant = "") -> Json:
        """Get a conversation, without its items."""
        return _describe(await conversations.get(conversation, tenant))

    @router.post("/conversations/{conversation}", tags=["openai"])
    async def update_conversation(
        conversation: str, body: MetadataBody, tenant: Tenant = ""
    ) -> Json:
        """Replace the metadata of a conversation."""
        return _describe(await conversations.update(conversation, tenant, body.metadata or {}))

    @router.delete("/conversations/{conversation}", tags=["openai"])
    async def delete_conversation(conversation: str, tenant: Tenant = "") -> Json:
        """Delete a conversation and its items; responses that it was made of stay."""
        await conversations.delete(conversation, tenant)
        return {"id": conversation, "object": "conversation.deleted", "deleted": True}


def _add_items(router: APIRouter, service: SessionService) -> None:
    conversations = service.named_conversations

    @router.post("/conversations/{conversation}/items", tags=["openai"])
    async def create_items(
        request: Request, conversation: str, body: ItemsBody, key: Key = None, tenant: Tenant = ""
    ) -> Json:
        """Append items to a conversation; the next response reads them."""
        idempotency = get_idempotency_key(request, key, body)
        items = await conversations.add_items(
            conversation, tenant, _build_items(body.items, service), idempotency
        )
        return build_page([json.loads(item.body) for item in items], len(items))

    @router.get("/conversations/{conversation}/items", tags=["openai"])
    async def list_items(
        conversation: str,
        after: After = None,
        limit: Limit = 20,
        order: Order = "desc",
        tenant: Tenant = "",
    ) -> Json:
        """List the items of a conversation."""
        try:
            items = await conversations.get_items(
                conversation, tenant, after, limit + 1, order == "desc"
            )
        except UnknownItem as error:
            raise InvalidRequest("after", error.message) from error
        return build_page([json.loads(item.body) for item in items], limit)

    @router.get("/conversations/{conversation}/items/{item}", tags=["openai"])
    async def get_item(conversation: str, item: str, tenant: Tenant = "") -> Json:
        """Get an item of a conversation."""
        found: Json = json.loads((await conversations.get_item(conversation, tenant, item)).body)
        return found

    @router.delete("/conversations/{conversation}/items/{item}", tags=["openai"])
    async def delete_item(conversation: str, item: str, tenant: Tenant = "") -> Json:
        """Delete an item of a conversation: the next response is made without it."""
        await conversations.delete_item(conversation, tenant, item)
        return _describe(await conversations.get(conversation, tenant))


def _build_items(items: Sequence[Json], service: SessionService) -> list[StoredItem]:
    """Check items and give them ids. Raises InvalidRequest with the place."""
    tolerance = Tolerance(service.limits.mends, IgnoredParts())
    placed = [parse_item(item, f"items[{index}]", tolerance) for index, item in enumerate(items)]
    built = [to_item(each, draw_item_id(each.kind)) for each in placed]
    return [StoredItem(item["id"], json.dumps(item)) for item in built]


def _describe(conversation: StoredConversation) -> Json:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": dict(conversation.metadata),
    }
