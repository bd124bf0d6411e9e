"""Requests for responses, plain and streamed."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
PATH = "/v1/responses"


@pytest.fixture
def ask(api: Any) -> Callable[..., Awaitable[httpx.Response]]:
    """ask(input, headers=None, **members): a request for a response."""

    async def send(
        input: str | list[Json], headers: Json | None = None, **members: Any
    ) -> httpx.Response:
        body = {"model": api.service.info.model, "input": input, **members}
        answer: httpx.Response = await api.http.post(PATH, json=body, headers=headers)
        return answer

    return send


@pytest.fixture
def answer(ask: Callable[..., Awaitable[httpx.Response]]) -> Callable[..., Awaitable[Json]]:
    """answer(input, **members): the response, which must be there."""

    async def send(input: str | list[Json], **members: Any) -> Json:
        response = await ask(input, **members)
        assert response.status_code == 200, response.text
        found: Json = response.json()
        return found

    return send


@pytest.fixture
def get_text() -> Callable[[Json], str]:
    """The text of a response."""
    return lambda response: "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


@pytest.fixture
def turns(api: Any) -> list[pb.TurnRequest]:
    """The turns that the worker is asked for."""
    asked: list[pb.TurnRequest] = []
    worker_turn = api.worker.turn

    def turn(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        asked.append(request)
        events: AsyncIterator[pb.TurnEvent] = worker_turn(request)
        return events

    api.worker.turn = turn
    return asked
