"""Spans of the gRPC API's calls."""

from typing import Any

import grpc
import pytest

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


@pytest.fixture
def traces() -> bool:
    return True


async def test_a_call_goes_on_with_the_clients_trace(rpc: Any, exported: Any) -> None:
    call = rpc.stub.GetModel(pb.GetModelRequest(), metadata=SENT)
    await call
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.GetSession(pb.GetSessionRequest(session="s_none"), metadata=SENT)
    found, missing = exported.get_finished_spans()
    service = "kvrecall.sessions.v1.Sessions"
    assert [found.name, missing.name] == [f"{service}/GetModel", f"{service}/GetSession"]
    assert f"{found.context.trace_id:032x}" == TRACE
    assert found.attributes["rpc.response.status_code"] == "OK"
    # A caller's mistake is no error of the service.
    assert missing.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert "error.type" not in missing.attributes
    for span, trailing in (
        (found, await call.trailing_metadata()),
        (missing, refused.value.trailing_metadata()),
    ):
        expected = f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert dict(trailing)["traceresponse"] == expected
