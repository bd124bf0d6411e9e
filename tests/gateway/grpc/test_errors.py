"""Errors as google.rpc.Status: codes, details, and a size that clients accept."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status.rpc_status import to_status

from gateway.grpc.errors import build_status, get_status_code
from gateway.http.errors import build_problem
from kvrecall.domain.codes import ErrorCode
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from tests.gateway.contract.grpc_client import read_status

REQUEST: Any = pb.CreateSessionRequest.DESCRIPTOR
# What a client takes by default: the limit of grpc-core on metadata.
CLIENTS_LIMIT = 8192


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status_that_tells_clients_what_to_do(code: ErrorCode) -> None:
    status = get_status_code(code)
    assert (status is grpc.StatusCode.UNAVAILABLE) == (code.http_status == 503)
    assert (status is grpc.StatusCode.INTERNAL) == (code.http_status == 500)
    assert status not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK)


def test_the_reason_is_the_code_and_the_limit_is_a_detail() -> None:
    problem = build_problem(ErrorCode.LIMIT_EXCEEDED, "too much", {"field": "seed", "limit": 7})
    info = error_details_pb2.ErrorInfo()
    status = build_status(problem, REQUEST, "id", 1.5)
    status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["limit"]) == ("LIMIT_EXCEEDED", "kvrecall", "7")
    retry = error_details_pb2.RetryInfo()
    status.details[2].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("letter", ["x", "é", "𝄞"])
def test_a_status_fits_into_what_clients_take(letter: str) -> None:
    long = letter * 5000
    violations = [{"field": long, "message": long} for _ in range(200)]
    details = {f"detail_{number}": [long] * 20 for number in range(50)}
    problem = build_problem(ErrorCode.INVALID_REQUEST, long, {**details, "errors": violations})
    found = to_status(build_status(problem, REQUEST, "x" * 128, 1.0))
    message = "".join(f"%{byte:02X}" for byte in found.details.encode())  # as it is sent, at worst
    sizes = [len(name) + len(value) * 4 / 3 for name, value in found.trailing_metadata]
    assert CLIENTS_LIMIT / 2 < len(message) + sum(sizes) < CLIENTS_LIMIT


async def test_an_unexpected_error_reveals_nothing(
    rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(rpc.service, "get", fail)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.GetSession(pb.GetSessionRequest(session="s_1"))
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert read_status(refused.value).code == "internal_error"
    assert "secret" not in str(refused.value)
