"""Sends gRPC calls as bytes, of the API or of a worker's own port."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from hypothesis import strategies as st

from benchmarks.fuzz.cases.protobufs import serialized
from benchmarks.fuzz.replies import SECONDS
from benchmarks.fuzz.requests import Cut, Reply, Request

Metadata = tuple[tuple[str, str], ...]
# Of a stream, as many replies are read as a turn of the fuzzer has at most.
_MOST_REPLIES = 200
# Trailing metadata of a worker's refusal.
_WORKER_CODE = "kvrecall-code"
ODD_METADATA: Sequence[Metadata] = (
    (),
    (),
    (),
    (("x-kvrecall-tenant", "ann"),),
    (("x-request-id", "%00" * 100),),
    (("traceparent", "00-zz"),),
    (("grpc-nothing", "1"),),
    (("x-big", "a" * 6000),),
)


class CallSender:
    """A channel to a server, with metadata that every call carries. Safe for several threads."""

    def __init__(self, address: str, metadata: Metadata, patience: float = SECONDS + 30) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.enable_retries", 0)])
        self._metadata = metadata
        self._patience = patience

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def send(self, request: Request) -> Reply:
        """Make a call and read what it streams, or cancel it after its first reply."""
        start = time.monotonic()
        method: Any = self._channel.unary_stream(request.path)
        call = method(
            request.body,
            timeout=self._patience,
            metadata=(*self._metadata, *request.headers),
        )
        body = b""
        try:
            for number, part in enumerate(call):
                body += part
                if request.cut is Cut.REPLY or number > _MOST_REPLIES:
                    call.cancel()
                    return Reply("left", body=body, error="left")
        except grpc.RpcError as error:
            return _read_error(error, time.monotonic() - start)
        return Reply("OK", body=body, seconds=time.monotonic() - start)


def _read_error(error: Any, seconds: float) -> Reply:
    details = str(error.details() or "").encode("utf-8", "replace")
    code = dict(error.trailing_metadata() or ()).get(_WORKER_CODE, "")
    status = rpc_status.from_call(error)
    for detail in () if status is None else status.details:
        info = ErrorInfo()
        if detail.Unpack(info):
            code = info.reason.lower()
        details += b" " + detail.value
    return Reply(error.code().name, body=details, code=str(code), seconds=seconds)


def call_requests(
    door: str, service: ServiceDescriptor, resolve: Callable[[str], str]
) -> st.SearchStrategy[Request]:
    """Return calls of all methods of a service, and of one that it lacks."""
    paths = [(f"/{service.full_name}/{method.name}", method) for method in service.methods]
    paths.append((f"/{service.full_name}/Nothing", service.methods[0]))

    @st.composite
    def draw_call(draw: st.DrawFn) -> Request:
        path, method = draw(st.sampled_from(paths))
        body = draw(serialized(method, resolve))
        metadata = draw(st.sampled_from(ODD_METADATA))
        cut = draw(st.sampled_from((Cut.NONE,) * 6 + (Cut.REPLY,)))
        return Request(door, "CALL", path, metadata, body, cut)

    return draw_call()
