"""The calls of sessions.proto, answered by the session service as the REST API's routes are."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace

from gateway.grpc.convert import build_message, fill_message, parse_body
from gateway.grpc.requests import (
    ListRepairsBody,
    ListSessionsBody,
    get_key,
    get_session_id,
    parse_event,
)
from gateway.http.sse import read_outcome
from gateway.rest.schemas.episodes import to_episodes
from gateway.rest.schemas.events import to_receipt
from gateway.rest.schemas.memory import to_memory
from gateway.rest.schemas.messages import to_tool_call
from gateway.rest.schemas.public import to_dict
from gateway.rest.schemas.repairs import to_repairs
from gateway.rest.schemas.sessions import (
    CreateSessionBody,
    ForkBody,
    MoveBody,
    to_session,
    to_session_page,
)
from gateway.rest.schemas.turns import TurnBody, to_logprobs, to_turn
from gateway.rest.schemas.workers import to_methods, to_worker, to_workers
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from services.access.principals import Principal
from services.service import SessionService
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnProgress,
    TurnStream,
)


class SessionsServicer:
    """Answers every call of `service Sessions` in the name of a caller.

    A method has the snake-case name of its call. It raises ServiceError, CallRefused and pydantic's
    ValidationError for a refused request. Cancelling it cancels its turn.
    """

    def __init__(self, service: SessionService) -> None:
        self._service = service

    async def create_session(
        self, request: pb.CreateSessionRequest, caller: Principal
    ) -> pb.Session:
        """Create a session of the caller's tenant."""
        body = parse_body(CreateSessionBody, request)
        session = await self._service.create(
            replace(body.to_domain(), tenant=caller.tenant),
            get_key(request, "CreateSession", caller, body=body),
        )
        return self._describe(session, session.committed_state)

    async def get_session(self, request: pb.GetSessionRequest, caller: Principal) -> pb.Session:
        """Get a session."""
        found, state = await self._service.get(get_session_id(request), caller.tenant)
        return self._describe(found, state)

    async def list_sessions(
        self, request: pb.ListSessionsRequest, caller: Principal
    ) -> pb.ListSessionsResponse:
        """List a page of the tenant's sessions."""
        query = parse_body(ListSessionsBody, request)
        found = await self._service.reading.search(query.to_domain(), caller.tenant)
        page = to_session_page(found, self._service.info.model)
        return build_message(pb.ListSessionsResponse, page)

    async def delete_session(
        self, request: pb.DeleteSessionRequest, caller: Principal
    ) -> pb.DeleteSessionResponse:
        """Delete a session."""
        session = get_session_id(request)
        key = get_key(request, "DeleteSession", caller, session)
        await self._service.delete(session, key, caller.tenant)
        return pb.DeleteSessionResponse()

    async def fork_session(self, request: pb.ForkSessionRequest, caller: Principal) -> pb.Session:
        """Fork a session."""
        session = get_session_id(request)
        body = parse_body(ForkBody, request)
        key = get_key(request, "ForkSession", caller, session, body)
        fork = await self._service.fork(session, body.to_domain(), key, caller.tenant)
        return self._describe(fork, fork.committed_state)

    async def move_session(self, request: pb.MoveSessionRequest, caller: Principal) -> pb.Session:
        """Move a session to another worker."""
        session = get_session_id(request)
        worker = parse_body(MoveBody, request).worker
        moved = await self._service.move(session, worker, caller.tenant)
        return self._describe(moved, moved.committed_state)

    async def send_turn(self, request: pb.SendTurnRequest, caller: Principal) -> pb.Turn:
        """Run a turn and return it when it is committed."""
        async with aclosing(self._start_turn(request, caller)) as stream:
            return build_message(pb.Turn, to_turn(await read_outcome(stream)))

    async def stream_turn(
        self, request: pb.SendTurnRequest, caller: Principal
    ) -> AsyncGenerator[pb.TurnEvent, None]:
        """Run a turn and yield its events."""
        async with aclosing(self._start_turn(request, caller)) as stream:
            async for progress in stream:
                event = _to_event(progress)
                if event is not None:
                    yield event

    async def send_event(self, request: pb.SendEventRequest, caller: Principal) -> pb.EventReceipt:
        """Record a tool event."""
        session = get_session_id(request)
        body, event = parse_event(request)
        key = get_key(request, "SendEvent", caller, session, body)
        receipt = await self._service.event(session, event, key, caller.tenant)
        return build_message(pb.EventReceipt, to_receipt(receipt))

    async def get_memory(self, request: pb.GetMemoryRequest, caller: Principal) -> pb.Memory:
        """Get a session's memory."""
        session = get_session_id(request)
        memory = await self._service.memory(session, caller.tenant)
        return build_message(pb.Memory, to_memory(session, memory))

    async def list_repairs(
        self, request: pb.ListRepairsRequest, caller: Principal
    ) -> pb.ListRepairsResponse:
        """List a session's last repairs."""
        session = get_session_id(request)
        limit = parse_body(ListRepairsBody, request).limit
        found = await self._service.repairs(session, limit, caller.tenant)
        history = to_dict(to_repairs(session, found))["repairs"]
        repairs = [{**each, "repair": each} for each in history]
        return fill_message(pb.ListRepairsResponse(session=session), {"repairs": repairs})

    async def list_episodes(
        self, request: pb.ListEpisodesRequest, caller: Principal
    ) -> pb.ListEpisodesResponse:
        """List a session's episodes."""
        session = get_session_id(request)
        episodes = to_episodes(*await self._service.episodes(session, caller.tenant))
        return build_message(pb.ListEpisodesResponse, episodes)

    async def get_model(self, request: pb.GetModelRequest, caller: Principal) -> pb.Model:
        """Get the served model and its limits."""
        return build_message(pb.Model, to_worker(self._service.info))

    async def list_methods(
        self, request: pb.ListMethodsRequest, caller: Principal
    ) -> pb.ListMethodsResponse:
        """List the eviction methods and the repair."""
        return build_message(pb.ListMethodsResponse, to_methods(self._service.info))

    async def list_workers(
        self, request: pb.ListWorkersRequest, caller: Principal
    ) -> pb.ListWorkersResponse:
        """List the reachable workers."""
        workers = to_workers(*await self._service.describe_workers())
        return build_message(pb.ListWorkersResponse, workers)

    def _start_turn(self, request: pb.SendTurnRequest, caller: Principal) -> TurnStream:
        session = get_session_id(request)
        body = parse_body(TurnBody, request)
        return self._service.turn(
            session,
            body.to_domain(self._service.default_sampling),
            # The same for both calls: a stream that broke may be repeated as a plain call.
            get_key(request, "SendTurn", caller, session, body),
            caller.tenant,
        )

    def _describe(self, session: Session, state: SessionState) -> pb.Session:
        return build_message(pb.Session, to_session(session, state, self._service.info.model))


def _to_event(progress: TurnProgress) -> pb.TurnEvent | None:
    """Convert a turn's progress; None for what has no event, as its start."""
    match progress:
        case ReasoningDelta(text):
            return pb.TurnEvent(reasoning=pb.TextDelta(text=text))
        case TextDelta(text, logprobs):
            piece = {"text": text, "logprobs": [to_dict(each) for each in to_logprobs(logprobs)]}
            return pb.TurnEvent(text=fill_message(pb.TextDelta(), piece))
        case ArgumentsDelta():
            return pb.TurnEvent(arguments=pb.ArgumentsDelta(**asdict(progress)))
        case ToolCallEmitted(call):
            return pb.TurnEvent(tool_call=build_message(pb.ToolCall, to_tool_call(call)))
        case TurnFinished(outcome):
            return pb.TurnEvent(turn=build_message(pb.Turn, to_turn(outcome)))
        case _:
            return None
