"""Turns on the way out: as one answer or as server-sent events; a client that goes away cancels its turn."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from gateway.errors import problem_of, unexpected
from gateway.rest.schemas.views import ToolCallView, TurnView
from kvrecall.domain.errors import ServiceError, WorkerLost
from kvrecall.domain.reports import TurnOutcome
from services.turn_stream import (
    TextDelta,
    ToolCallEmitted,
    TurnEnded,
    TurnProgress,
    TurnStarted,
    TurnStream,
)

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before the answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` as long as the client is there. Raises ClientGone."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def outcome_of(stream: TurnStream) -> TurnOutcome:
    """Read a turn to its end. Raises what the turn raises."""
    async for progress in stream:
        if isinstance(progress, TurnEnded):
            return progress.outcome
    raise WorkerLost("the turn ended without an answer")


class EventStream(Response):
    """A turn that has started, as server-sent events. The last event is `done` or `error`, never neither."""

    media_type = "text/event-stream"

    def __init__(self, stream: TurnStream, heartbeat_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._heartbeat_seconds = heartbeat_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnect(receive))
        writing = asyncio.create_task(self._write(send))
        try:
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            await self._stream.aclose()
            writing.cancel()
            await asyncio.wait({gone, writing})
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with asyncio.TaskGroup() as beats:
            beating = beats.create_task(self._beat(send))
            await self._write_events(send)
            beating.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(self, send: Send) -> None:
        try:
            async for progress in self._stream:
                if (event := _event(progress)) is not None:
                    await _send_chunk(send, event)
        except ServiceError as error:
            await _send_chunk(send, _encode("error", problem_of(error)))
        except Exception:
            await _send_chunk(send, _encode("error", unexpected()))

    async def _beat(self, send: Send) -> None:
        """Comments that keep proxies from taking a long prefill for a dead connection."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            await _send_chunk(send, b": waiting\n\n")


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _event(progress: TurnProgress) -> bytes | None:
    match progress:
        case TurnStarted():
            return None
        case TextDelta(text):
            return _encode("token", {"text": text})
        case ToolCallEmitted(call):
            return _encode("tool_call", ToolCallView.of(call))
        case TurnEnded(outcome):
            return _encode("done", TurnView.of(outcome))


def _encode(event: str, data: BaseModel | dict[str, Any]) -> bytes:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {event}\ndata: {text}\n\n".encode()
