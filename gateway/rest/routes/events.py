"""Route of tool events."""

from fastapi import APIRouter, Request

from gateway.http.errors import problem_responses
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.tenants import Tenant
from gateway.rest.schemas.events import EventBody, to_receipt
from kvrecall import client
from services.service import SessionService


def add_event_routes(router: APIRouter, service: SessionService) -> None:
    """Add the route of tool events."""

    @router.post(
        "/sessions/{session}/events", responses=problem_responses(404, 409, 429), tags=["events"]
    )
    async def send_event(
        request: Request, session: str, body: EventBody, key: Key = None, tenant: Tenant = ""
    ) -> client.EventReceipt:
        """Report a tool call's start, a chunk of its output, its result or its failure.

        A repair conditioned on the new information may start at once.
        """
        receipt = await service.event(
            session, body.to_domain(), get_idempotency_key(request, key, body), tenant
        )
        return to_receipt(receipt)
