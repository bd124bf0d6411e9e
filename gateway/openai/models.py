"""The models that OpenAI's API names: the one that is served, and its aliases."""

import time
from typing import Any

from fastapi import APIRouter

from gateway.settings import GatewaySettings
from kvrecall.domain.errors import UnknownModel
from services.service import SessionService


def add_model_routes(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    """Add the routes of models."""
    started = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "kvrecall"}

    @router.get("/models", tags=["openai"])
    async def list_models() -> dict[str, Any]:
        """List the model that is served, and its aliases."""
        names = [service.info.model, *settings.model_aliases]
        return {"object": "list", "data": [describe(name) for name in names]}

    @router.get("/models/{model:path}", tags=["openai"])
    async def get_model(model: str) -> dict[str, Any]:
        """Get the model of this name."""
        require_model(model, service, settings)
        return describe(model)


def require_model(name: str, service: SessionService, settings: GatewaySettings) -> None:
    """Raise UnknownModel unless the service serves it."""
    if name != service.info.model and name not in settings.model_aliases:
        message = f"model {name!r} is not served here; {service.info.model!r} is"
        raise UnknownModel("model", message)
