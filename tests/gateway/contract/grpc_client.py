"""gRPC's client of the contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub
from tests.gateway.contract.clients import Begun, Json, Refused
from tests.gateway.contract.messages import build_request, to_json


class GrpcClient:
    """The session API over gRPC. Messages are converted by code of the tests."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = SessionsStub(channel)
        self.tenant = ""

    async def create(self, body: Json | None = None, key: str = "") -> Json:
        """Create a session."""
        return await self._send("CreateSession", pb.CreateSessionRequest, body or {}, key=key)

    async def get(self, session: str) -> Json:
        """Get a session."""
        return await self._send("GetSession", pb.GetSessionRequest, {}, session)

    async def page(self, **query: Any) -> Json:
        """List sessions."""
        return await self._send("ListSessions", pb.ListSessionsRequest, query)

    async def delete(self, session: str, key: str = "") -> None:
        """Delete a session."""
        await self._send("DeleteSession", pb.DeleteSessionRequest, {}, session, key)

    async def fork(self, session: str, body: Json | None = None, key: str = "") -> Json:
        """Fork a session."""
        return await self._send("ForkSession", pb.ForkSessionRequest, body or {}, session, key)

    async def move(self, session: str, body: Json | None = None) -> Json:
        """Move a session."""
        return await self._send("MoveSession", pb.MoveSessionRequest, body or {}, session)

    async def turn(self, session: str, body: Json, key: str = "") -> Json:
        """Send a turn."""
        return await self._send("SendTurn", pb.SendTurnRequest, body, session, key)

    async def stream(self, session: str, body: Json, key: str = "") -> list[tuple[str, Any]]:
        """Send a turn; its events."""
        request = build_request(pb.SendTurnRequest, body, session, key)
        with _mapped_errors():
            call = self._stub.StreamTurn(request, metadata=self._metadata)
            return [_to_event(event) async for event in call]

    async def begin_stream(self, session: str, body: Json) -> Begun:
        """Send a turn and read its first event."""
        call = self._stub.StreamTurn(build_request(pb.SendTurnRequest, body, session))
        await call.read()

        async def cancel() -> None:
            call.cancel()

        return Begun(cancel)

    async def event(self, session: str, body: Json, key: str = "") -> Json:
        """Report a tool event."""
        kind = body["type"].removeprefix("tool_call.")
        report = {k: v for k, v in body.items() if k not in ("type", "call_id")}
        values = {"call_id": body.get("call_id", ""), kind: report}
        return await self._send("SendEvent", pb.SendEventRequest, values, session, key)

    async def read(self, session: str, what: str, **query: Any) -> Json:
        """Get a session's memory, repairs or episodes."""
        calls = {
            "memory": ("GetMemory", pb.GetMemoryRequest),
            "repairs": ("ListRepairs", pb.ListRepairsRequest),
            "episodes": ("ListEpisodes", pb.ListEpisodesRequest),
        }
        name, kind = calls[what]
        return await self._send(name, kind, query, session)

    async def describe(self, what: str) -> Json:
        """Get the worker, the workers or the methods."""
        calls = {
            "worker": ("GetModel", pb.GetModelRequest),
            "workers": ("ListWorkers", pb.ListWorkersRequest),
            "methods": ("ListMethods", pb.ListMethodsRequest),
        }
        name, kind = calls[what]
        return await self._send(name, kind, {})

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-kvrecall-tenant", self.tenant),) if self.tenant else ()

    async def _send(
        self, call: str, kind: type[Any], body: Json, session: str = "", key: str = ""
    ) -> Json:
        request = build_request(kind, body, session, key)
        with _mapped_errors():
            return to_json(await getattr(self._stub, call)(request, metadata=self._metadata))


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise read_status(error) from error


def read_status(error: grpc.aio.AioRpcError) -> Refused:
    """Read a refusal from the details of a status."""
    found = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    status: Any = rpc_status.from_call(_SyncCall(error))
    assert status is not None, error
    assert (status.code, status.message) == (error.code().value[0], error.details())
    kinds = []
    for detail in status.details:
        kinds.append(detail.type_url.rpartition(".")[2])
        detail.Unpack(found)
        detail.Unpack(bad)
    assert found.domain == "kvrecall"
    fields = [violation.field for violation in bad.field_violations]
    return Refused(found.reason.lower(), fields, "RetryInfo" in kinds)


class _SyncCall:
    """The error with the interface of grpc's blocking calls, which grpc_status expects."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self._trailing = error.trailing_metadata()

    def trailing_metadata(self) -> Any:
        """Trailing metadata as pairs."""
        return tuple(self._trailing or ())


def _to_event(event: pb.TurnEvent) -> tuple[str, Any]:
    names = {"text": "token", "turn": "done", "arguments": "arguments_delta"}
    kind = event.WhichOneof("event")
    assert kind is not None
    return names.get(kind, kind), to_json(getattr(event, kind))
