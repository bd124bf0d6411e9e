"""Responses in the background: computed while no client waits, and read by their ids.

A response is stored when its turn has been accepted and again when it has ended. The process that
computes it holds a claim on its id. A claim that is free before that was its process's loss: the
next one that reads the response stores the outcome of its turn, or that it failed.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gateway.http.errors import log_unexpected_error, to_problem
from gateway.openai.responses import objects
from gateway.openai.responses.answering import IN_PROGRESS, Answering
from gateway.openai.responses.event_log import EncodedStream, EventLog
from gateway.openai.responses.events import ResponseEvents, encode_event
from gateway.openai.responses.ids import TurnName
from kvrecall.domain.errors import (
    InvalidRequest,
    ServiceError,
    SessionBusy,
    UnknownResponse,
    WorkerLost,
)
from kvrecall.domain.tolerance.ignored import Ignored
from services.cancellation import run_to_completion
from services.catalog.records import IdempotencyKey
from services.catalog.responses import StoredResponse
from services.conversations.continuation import Continuation
from services.conversations.responses import AnswerClaim
from services.service import SessionService
from services.streams.turn import replay

Json = dict[str, Any]
_CANCELLED = "cancelled"
# Ended responses whose events can be sent again as they were.
_KEPT_RUNS = 64
_POLL_SECONDS = 0.5
# A response that has ended is stored a moment before its claim is free.
_RELEASE_SECONDS = 1.0


@dataclass
class Run:
    """A response that is computed in this process, or was."""

    answering: Answering
    found: Continuation
    claim: AnswerClaim
    head: Json
    log: EventLog
    cancelled: bool = False

    async def cancel(self) -> None:
        """Cancel its turn, unless that is committed; return when what came of it is stored."""
        self.cancelled = True
        await self.found.stream.aclose()
        await self.log.wait()

    async def work(self) -> None:
        """Compute the response and store it, however it ends."""
        encoder = self.answering.encode(self.found)
        self.log.add(encoder.begin())
        try:
            async for progress in self.found.stream:
                self.log.add(encoder.encode(progress))
        except ServiceError as error:
            await self._fail(encoder, to_problem(error))
        except asyncio.CancelledError:
            stopped = WorkerLost("the server was stopped before the response was complete")
            await run_to_completion(self._fail(encoder, to_problem(stopped)))
            raise
        except Exception:
            await self._fail(encoder, log_unexpected_error())
        finally:
            await run_to_completion(self._end())

    async def _fail(self, encoder: ResponseEvents, problem: Mapping[str, Any]) -> None:
        await self.found.stream.aclose()  # a turn that was just committed is recorded by then
        if self.cancelled:
            failed = self.head | {"status": _CANCELLED}
        else:
            failed = encoder.build_failure(problem)
            self.log.add(encoder.fail(problem))
        with suppress(ServiceError):  # the next read finds the claim free
            await self.answering.store(self.found, failed, self.found.asked)

    async def _end(self) -> None:
        await self.found.stream.aclose()
        await self.claim.release()
        self.log.end()


@dataclass(frozen=True)
class Begun:
    """A response in the background as its client gets it, and the stream of its events."""

    found: Continuation
    response: Json
    stream: EncodedStream

    @property
    def session(self) -> str:
        """Its session."""
        return self.found.session

    @property
    def match(self) -> str:
        """How the session was found."""
        return self.found.match

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """Parts of the messages that were mended."""
        return self.found.ignored

    @property
    def turn(self) -> int:
        """The number of its turn."""
        return self.found.turn


class BackgroundResponses:
    """The responses in the background that this process computes, and those that it reads."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._runs: OrderedDict[str, Run] = OrderedDict()

    async def start(self, answering: Answering, key: IdempotencyKey | None) -> Begun:
        """Store the response in progress and go on without its client.

        A repeated request waits for the first one, as for its turn, and gets the response that it
        stored. Raises as `Answering.start`.
        """
        found = await answering.start(key)
        head = answering.encode(found).head
        claim = self._service.responses.claim(head["id"])
        try:
            await claim.acquire(self._service.limits.queue_seconds)
            committed = await self._find_committed(head["id"], answering.tenant)
            if committed is None:
                await answering.store(found, head, found.asked)
        except BaseException:
            await run_to_completion(_give_up(found, claim))
            raise
        if committed is not None:
            await run_to_completion(_give_up(found, claim))
            events = await self.stream(head["id"], answering.tenant, None)
            return Begun(found, committed, events)
        run = Run(answering, found, claim, head, EventLog())
        self._keep(run)
        self._service.follow(run.work(), "background response")
        self._service.follow(self._watch(run, answering.tenant), "background response watch")
        return Begun(found, objects.queue(head), EncodedStream(run.log.read(-1)))

    async def _find_committed(self, response_id: str, tenant: str) -> Json | None:
        """Return the stored response if its turn was committed, as it is under a repeated key."""
        try:
            stored = await self._service.responses.get(response_id, tenant)
        except UnknownResponse:
            return None
        body: Json = json.loads(stored.body)
        return body if objects.is_committed(body) else None

    async def read(self, response_id: str, tenant: str) -> Json:
        """Return a response, recovered if its process was lost. Raises UnknownResponse."""
        stored = await self._service.responses.get(response_id, tenant)
        body: Json = json.loads(stored.body)
        if body["status"] != IN_PROGRESS or self._is_here(response_id):
            return body
        claim = self._service.responses.claim(response_id)
        try:
            await claim.acquire(_RELEASE_SECONDS)
        except SessionBusy:
            return body  # another process computes it
        try:
            return await self._recover(await self._service.responses.get(response_id, tenant))
        finally:
            await claim.release()

    async def cancel(self, response_id: str, tenant: str) -> Json:
        """Cancel a response that is in progress; one that has ended stays as it is.

        Raises UnknownResponse, and InvalidRequest for one that is not in the background.
        """
        body = await self.read(response_id, tenant)
        if not body["background"]:
            raise InvalidRequest("response_id", "Cannot cancel a synchronous response.")
        if body["status"] != IN_PROGRESS:
            return body
        if self._is_here(response_id):
            await self._runs[response_id].cancel()
        stored = await self._service.responses.get(response_id, tenant)
        body = dict(json.loads(stored.body))
        if body["status"] == IN_PROGRESS:  # the process that computes it finds this
            body |= {"status": _CANCELLED}
            await self._service.responses.store(replace(stored, body=json.dumps(body)))
        return body

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response, and end its turn unless that is committed. Raises UnknownResponse."""
        await self._service.responses.delete(response_id, tenant)
        if self._is_here(response_id):
            await self._runs[response_id].cancel()
        self._runs.pop(response_id, None)

    async def stream(self, response_id: str, tenant: str, after: int | None) -> EncodedStream:
        """Return the events of a response behind number `after`, of one in progress to its end.

        Where its events are not kept any more, the last one tells the whole response. Raises as
        `cancel`.
        """
        body = await self.read(response_id, tenant)
        if not body["background"]:
            message = "only a background response can be streamed again"
            raise InvalidRequest("stream", message, openai_code="unsupported_parameter")
        run = self._runs.get(response_id)
        if run is not None:
            return EncodedStream(run.log.read(-1 if after is None else after))
        return EncodedStream(self._retell(response_id, tenant, after))

    async def _retell(
        self, response_id: str, tenant: str, after: int | None
    ) -> AsyncIterator[bytes]:
        number = 0 if after is None else after + 1
        body = await self.read(response_id, tenant)
        if after is None:
            head = objects.queue(body)
            yield encode_event("response.created", 0, response=head)
            yield encode_event("response.queued", 1, response=head)
            yield encode_event("response.in_progress", 2, response=head | {"status": IN_PROGRESS})
            number = 3
        while body["status"] == IN_PROGRESS:
            await asyncio.sleep(_POLL_SECONDS)
            body = await self.read(response_id, tenant)
        if body["status"] != _CANCELLED:
            yield encode_event(f"response.{body['status']}", number, response=body)

    async def _recover(self, stored: StoredResponse) -> Json:
        """Store the outcome of a response whose process was lost."""
        body: Json = json.loads(stored.body)
        if body["status"] != IN_PROGRESS:
            return body
        events = ResponseEvents(body, TurnName.parse(body["id"]), 0)
        committed = await self._service.responses.find_committed(stored)
        if committed is None:
            lost = WorkerLost("the server was lost before the response was complete; ask again")
            body = events.build_failure(to_problem(lost))
        else:
            outcome, history = committed
            for progress in replay(outcome):
                events.encode(progress)
            body = events.complete(outcome)
            stored = replace(stored, history=history)
        await self._service.responses.store(replace(stored, body=json.dumps(body)))
        return body

    async def _watch(self, run: Run, tenant: str) -> None:
        """Cancel the run when another process has cancelled or deleted the response."""
        seconds = self._service.limits.claim_seconds / 3
        while True:
            await run.log.wait(seconds)
            if run.log.ended:
                return
            try:
                stored = await self._service.responses.get(run.head["id"], tenant)
            except UnknownResponse:
                await run.cancel()
            except ServiceError:
                continue  # the catalog is unreachable
            else:
                if json.loads(stored.body)["status"] == _CANCELLED:
                    await run.cancel()

    def _keep(self, run: Run) -> None:
        """Keep the run; the oldest ended ones go."""
        self._runs[run.head["id"]] = run
        for id in list(self._runs)[: max(0, len(self._runs) - _KEPT_RUNS)]:
            if self._runs[id].log.ended:
                del self._runs[id]

    def _is_here(self, response_id: str) -> bool:
        run = self._runs.get(response_id)
        return run is not None and not run.log.ended


async def _give_up(found: Continuation, claim: AnswerClaim) -> None:
    """End the turn unless it is committed, and let others store its response."""
    await found.stream.aclose()
    await claim.release()
