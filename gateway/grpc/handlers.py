"""gRPC handlers of the servicer's calls: the request's bytes, its caller, errors, log and metrics."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status.rpc_status import to_status
from pydantic import ValidationError

from gateway.grpc.caller import get_rule_of_call, read_client, read_credentials, read_request_id
from gateway.grpc.errors import CallRefused, build_status
from gateway.grpc.servicer import SessionsServicer
from gateway.grpc.spans import begin_call_span, build_trace_metadata, end_call_span
from gateway.http.authentication import build_rate_headers
from gateway.http.errors import (
    RETRY_AFTER_SECONDS,
    build_problem,
    build_violations_problem,
    get_retry_seconds,
    log_unexpected_error,
    to_problem,
)
from gateway.http.settings import GatewaySettings
from gateway.observation.identity import bind_tenant
from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import Overloaded, ServiceError
from kvrecall.protocol.sessions_v1 import REQUEST_ID_KEY
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.telemetry.spans import Tracer, enter
from services.access.control import AccessControl, Admitted
from services.access.principals import Principal, acting_as

SERVICE = pb.DESCRIPTOR.services_by_name["Sessions"]
Context = grpc.aio.ServicerContext[Any, Any]
Trailing = list[tuple[str, str]]
CallObserver = Callable[[str, str], None]
"""Called at the end of a call with its name and the name of its status."""


class CallHandlers:
    """Handlers of all calls of `service Sessions`.

    Each reads its request itself, as bytes: the caller is known before a byte is read, a slow
    request is refused in time, and one that is no message gets an error of this API. At most
    `max_calls` run at once.
    """

    def __init__(
        self,
        servicer: SessionsServicer,
        access: AccessControl,
        settings: GatewaySettings,
        max_calls: int,
        observer: CallObserver,
        tracer: Tracer,
    ) -> None:
        self._servicer = servicer
        self._access = access
        self._settings = settings
        self._max_calls = max_calls
        self._observer = observer
        self._tracer = tracer
        self._running = 0
        self._log = structlog.get_logger("kvrecall.access")

    def build(self) -> grpc.GenericRpcHandler:
        """Build the gRPC handler of the service."""
        handlers = {method.name: self._build_handler(method) for method in SERVICE.methods}
        return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)

    def _build_handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        call = getattr(self._servicer, _snake_case(method.name))
        kind = GetMessageClass(method.input_type)
        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, call, kind), response_serializer=_serialize
            )
        return grpc.stream_unary_rpc_method_handler(
            self._answer(method, call, kind), response_serializer=_serialize
        )

    def _answer(
        self,
        method: MethodDescriptor,
        call: Callable[[Any, Principal], Awaitable[Message]],
        kind: type[Message],
    ) -> Callable[[Any, Context], Awaitable[Message]]:
        async def answer(_: object, context: Context) -> Message:
            async with self._guard(method, context) as caller:
                return await call(await self._read(kind, context), caller)

        return answer

    def _stream(
        self,
        method: MethodDescriptor,
        call: Callable[[Any, Principal], AsyncGenerator[Message, None]],
        kind: type[Message],
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def stream(_: object, context: Context) -> None:
            async with self._guard(method, context) as caller:
                request = await self._read(kind, context)
                async with aclosing(call(request, caller)) as events:
                    async for event in events:
                        await self._write(context, event)

        return stream

    async def _read(self, kind: type[Message], context: Context) -> Message:
        """Read the request. Raises CallRefused."""
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                content = await context.read()
        except TimeoutError as error:
            detail = f"the request did not arrive within {self._settings.body_seconds:g} seconds"
            raise CallRefused(build_problem(ErrorCode.BODY_TIMEOUT, detail)) from error
        if not isinstance(content, bytes):
            raise CallRefused(build_problem(ErrorCode.MALFORMED_MESSAGE, "there is no request"))
        try:
            return kind.FromString(content)
        except DecodeError as error:
            detail = f"the request is no {kind.DESCRIPTOR.full_name}"
            raise CallRefused(build_problem(ErrorCode.MALFORMED_MESSAGE, detail)) from error

    async def _write(self, context: Context, event: Message) -> None:
        """Send an event. Raises CallRefused when the client leaves it unread for too long."""
        try:
            async with asyncio.timeout(self._settings.send_seconds):
                await context.write(event)
        except TimeoutError as error:
            seconds = self._settings.send_seconds
            detail = f"events were left unread for {seconds:g} seconds"
            raise CallRefused(build_problem(ErrorCode.CANCELLED, detail)) from error

    @asynccontextmanager
    async def _guard(self, method: MethodDescriptor, context: Context) -> AsyncIterator[Principal]:
        """Admit a call, and provide its caller. Map errors to a status; log and count the call."""
        own = begin_call_span(self._tracer, method, context.invocation_metadata() or ())
        enter(own)  # a call has a task of its own
        request_id = read_request_id(context.invocation_metadata() or ())
        trailing: Trailing = [(REQUEST_ID_KEY, request_id), *build_trace_metadata(own)]
        bound = structlog.contextvars.bind_contextvars(request_id=request_id)
        started = time.monotonic()
        status = grpc.StatusCode.CANCELLED
        self._running += 1
        try:
            try:
                # gRPC's own limit counts a call until its client has taken the status.
                if self._running > self._max_calls:
                    detail = f"{self._max_calls} calls run, which is the limit; try again later"
                    raise Overloaded(detail, RETRY_AFTER_SECONDS)
                admitted = await self._admit(method, context)
                trailing += build_rate_headers(admitted.rates).items()
                context.set_trailing_metadata(tuple(trailing))
                bind_tenant(admitted.principal.tenant)
                client = read_client(context.invocation_metadata() or ())
                with acting_as(replace(admitted.principal, api="grpc", client=client)):
                    yield admitted.principal
                status = grpc.StatusCode.OK
            except Exception as error:
                problem, retry_seconds = _describe(error)
                found = to_status(
                    build_status(problem, method.input_type, request_id, retry_seconds)
                )
                status = found.code
                await self._abort(context, found, trailing)
        finally:
            self._running -= 1
            seconds = round(time.monotonic() - started, 6)
            self._observer(method.name, status.name)
            self._log.info("call", method=method.name, status=status.name, seconds=seconds)
            end_call_span(own, status, request_id)
            structlog.contextvars.reset_contextvars(**bound)

    async def _admit(self, method: MethodDescriptor, context: Context) -> Admitted:
        """Authenticate the caller, and count the call for its rates. Raises ServiceError."""
        rule = get_rule_of_call(method.name)
        credentials = read_credentials(context.invocation_metadata() or (), context.peer())
        return await self._access.admit(credentials, rule.scopes, computes=rule.computes)

    async def _abort(self, context: Context, found: grpc.Status, trailing: Trailing) -> None:
        """End a call with a status; give up on a client that reads nothing, as the status waits."""
        details = tuple(found.trailing_metadata or ())
        try:
            async with asyncio.timeout(self._settings.send_seconds):
                await context.abort(found.code, found.details or "", (*details, *trailing))
        except TimeoutError as error:
            raise asyncio.CancelledError("the status was left unread") from error


def _describe(error: Exception) -> tuple[Any, float | None]:
    """Return the members of an error's problem, and the time after which to try again."""
    match error:
        case ServiceError():
            return to_problem(error), get_retry_seconds(error)
        case ValidationError():
            return build_violations_problem(error.errors()), None
        case CallRefused():
            return error.problem, None
        case _:
            return log_unexpected_error(), None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
