"""The served model and its aliases, with the members that clients of several APIs read."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from gateway.conversation.answers import require_model
from gateway.http.settings import GatewaySettings
from services.service import SessionService

Json = dict[str, Any]


def add_model_routes(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    """Add the routes of models."""
    started = int(time.time())

    def describe(name: str) -> Json:
        """Describe the model in OpenAI's form, with the lengths as other servers and hosts name them."""
        context = service.info.most_tokens
        output = service.limits.cut_length(service.info.max_context)
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "kvrecall",
            "root": service.info.model,
            "parent": None,
            "max_session_tokens": service.info.max_session_tokens,  # with recall; null: no end
            "max_model_len": context,  # vLLM
            "context_length": context,  # OpenRouter, Together
            "max_completion_tokens": output,
            "meta": {"n_ctx": context, "n_ctx_train": context},  # llama.cpp
            "layer_kinds": [asdict(kind) for kind in service.info.layer_kinds],
            "type": "model",  # from here on Anthropic
            "display_name": name,
            "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": context,
            "max_tokens": output,
        }

    def list_all() -> Json:
        data = [describe(name) for name in (service.info.model, *settings.model_aliases)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"object": "list", "data": data, "has_more": False, **ends}

    @router.get("/models", tags=["openai"])
    async def list_models() -> Json:
        """List the model that is served, and its aliases."""
        return list_all()

    @router.get("/models/{model:path}", tags=["openai"])
    async def get_model(model: str) -> Json:
        """Get the model of this name; with none, the list."""
        if not model:
            return list_all()
        require_model(model, service, settings)
        return describe(model)
