"""Requests of conversations and of responses that name them."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

Json = dict[str, Any]


@pytest.fixture
def call(api: Any) -> Callable[..., Awaitable[Json]]:
    """call(method, path, **body): the answer to a request that succeeds."""

    async def send(method: str, path: str, **body: Any) -> Json:
        response = await api.http.request(method, f"/v1/conversations{path}", json=body or None)
        assert response.status_code == 200, response.text
        found: Json = response.json()
        return found

    return send


@pytest.fixture
def ask(api: Any) -> Callable[..., Awaitable[httpx.Response]]:
    """ask(conversation, input, **members): a response in a conversation."""

    async def send(conversation: str, input: str | list[Json], **members: Any) -> httpx.Response:
        own = {"model": api.service.info.model, "input": input, "conversation": conversation}
        answer: httpx.Response = await api.http.post("/v1/responses", json={**own, **members})
        return answer

    return send


@pytest.fixture
def read(call: Callable[..., Awaitable[Json]]) -> Callable[..., Awaitable[list[str]]]:
    """read(conversation): the texts of its items, oldest first."""

    async def texts(conversation: str) -> list[str]:
        page = await call("GET", f"/{conversation}/items?order=asc&limit=100")
        return [
            "".join(part["text"] for part in item["content"])
            if item["type"] == "message"
            else item.get("output", item.get("name", ""))
            for item in page["data"]
        ]

    return texts
