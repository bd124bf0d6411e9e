"""Responses of turns: one outcome or server-sent events. A disconnected client cancels its turn."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.errors import log_unexpected_error, to_problem
from kvrecall.domain.errors import ServiceError, WorkerLost
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import TokenLogprob
from kvrecall.domain.reports import TurnOutcome
from services.streams.turn import (
    ClosableStream,
    ProgressStream,
    TextDelta,
    TurnProgress,
)

COMMENT = b": waiting\n\n"
"""What is sent while there are no events."""

Result = TypeVar("Result")
Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)


class ClientDisconnected(Exception):
    """The client closed its connection before the response."""


async def run_while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` and return its result; cancel it when the client disconnects.

    Raises ClientDisconnected, and what `work` raises.
    """
    working = asyncio.create_task(work)
    disconnected = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.wait({working, disconnected})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_outcome(stream: ProgressStream) -> TurnOutcome:
    """Read a turn's stream to its end and return the outcome. Raises what the turn raises.

    It has the log-probabilities that the turn asked for, which are not stored with it.
    """
    received: list[TurnProgress] = []
    async for progress in stream:
        received.append(progress)
        if isinstance(progress, TurnFinished):
            break
    return get_outcome(received)


def get_outcome(received: Sequence[TurnProgress]) -> TurnOutcome:
    """Return the outcome that a turn's progress ends with. Raises WorkerLost if there is none."""
    logprobs: list[TokenLogprob] = []
    for progress in received:
        if isinstance(progress, TextDelta):
            logprobs += progress.logprobs
        if isinstance(progress, TurnFinished):
            return replace(progress.outcome, logprobs=tuple(logprobs))
    raise WorkerLost("the turn ended without a result; repeat it")


class Encoder(Protocol[Item_contra]):
    """The events of one API. Each method returns the bytes of none, one or several events."""

    def begin(self) -> bytes:
        """Encode what comes before the turn's progress."""
        ...

    def encode(self, progress: Item_contra) -> bytes:
        """Encode a piece of progress."""
        ...

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error, after which nothing follows."""
        ...


class EventStream(Response, Generic[Item]):
    """Started turn, or several, as server-sent events of an API."""

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: ClosableStream[Item],
        heartbeat_seconds: float,
        encoder: Encoder[Item],
        headers: Mapping[str, str] | None = None,
        beat: bytes = COMMENT,
    ) -> None:
        """Respond with the encoder's events, and with `beat` at every interval in between."""
        unbuffered = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers={**unbuffered, **(headers or {})})
        del self.headers["content-length"]
        self._stream = stream
        self._heartbeat_seconds = heartbeat_seconds
        self._encoder = encoder
        self._beat = beat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the turn ends; cancel the turn when the client disconnects."""
        disconnected = asyncio.create_task(_wait_for_disconnect(receive))
        writing = asyncio.create_task(self._write(send))
        try:
            await asyncio.wait({disconnected, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            await self._stream.aclose()
            writing.cancel()
            await asyncio.wait({disconnected, writing})
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(self._send_heartbeats(send))
            await self._write_events(send)
            heartbeat.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(self, send: Send) -> None:
        try:
            await _send_chunk(send, self._encoder.begin())
            async for progress in self._stream:
                await _send_chunk(send, self._encoder.encode(progress))
        except ServiceError as error:
            await _send_chunk(send, self._encoder.fail(to_problem(error)))
        except Exception:
            await _send_chunk(send, self._encoder.fail(log_unexpected_error()))

    async def _send_heartbeats(self, send: Send) -> None:
        """Send beats, so that nobody closes the connection during a long prefill."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            await _send_chunk(send, self._beat)


async def _send_chunk(send: Send, chunk: bytes) -> None:
    if chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
