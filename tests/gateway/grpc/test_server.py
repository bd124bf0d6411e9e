"""The gRPC server: health, reflection, TLS, deadlines, slow and greedy clients, shutdown."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError
from starlette.requests import Request
from structlog.testing import capture_logs

from gateway.grpc.server import CannotListen, GrpcServer
from gateway.grpc.settings import GrpcSettings
from gateway.http.settings import GatewaySettings
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub
from tests.gateway.contract.grpc_client import read_status

SERVICE = "kvrecall.sessions.v1.Sessions"
USER = [pb.Message(role=pb.ROLE_USER, content="hello")]
WAITS = 10_000


async def wait_until(holds: Any) -> None:
    for _ in range(WAITS):
        if holds():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come to hold")


async def create(rpc: Any) -> str:
    return str((await rpc.stub.CreateSession(pb.CreateSessionRequest(budget=64))).id)


def turn(session: str, **more: Any) -> pb.SendTurnRequest:
    return pb.SendTurnRequest(session=session, messages=USER, **more)


async def get_health(rpc: Any) -> int:
    stub: Any = health_pb2_grpc.HealthStub(rpc.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status)


async def test_health_says_that_the_server_stops_before_it_does(rpc: Any) -> None:
    assert await get_health(rpc) == health_pb2.HealthCheckResponse.SERVING
    await rpc.server.announce_stop()
    assert await get_health(rpc) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await create(rpc)


async def test_reflection_describes_the_service_unless_it_is_off(new_rpc: Any, rpc: Any) -> None:
    async def list_services(of: Any) -> set[str]:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(of.channel)

        async def requests() -> Any:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        (answer,) = [each async for each in stub.ServerReflectionInfo(requests())]
        return {service.name for service in answer.list_services_response.service}

    assert SERVICE in await list_services(rpc)
    hidden = await new_rpc(GrpcSettings(reflection=False))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await list_services(hidden)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tls_asks_for_certificates_of_clients(new_rpc: Any, tmp_path: Path) -> None:
    ca = trustme.CA()
    own = ca.issue_cert("127.0.0.1")
    for name, blob in (
        ("cert", own.cert_chain_pems[0]),
        ("key", own.private_key_pem),
        ("ca", ca.cert_pem),
    ):
        blob.write_to_path(tmp_path / name)
    settings = GrpcSettings(
        tls_cert=tmp_path / "cert", tls_key=tmp_path / "key", tls_client_ca=tmp_path / "ca"
    )
    roots = ca.cert_pem.bytes()
    theirs = ca.issue_cert("client")
    credentials = grpc.ssl_channel_credentials(
        roots, theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes()
    )
    rpc = await new_rpc(settings, None, credentials)
    assert await create(rpc)
    unknown = grpc.ssl_channel_credentials(roots)
    async with grpc.aio.secure_channel(rpc.server.address, unknown) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await SessionsStub(channel).GetModel(pb.GetModelRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_address_or_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    server = GrpcServer("127.0.0.1:0", GrpcSettings(), GatewaySettings())
    for listen, settings in (
        (server.address, GrpcSettings()),
        ("127.0.0.1:0", GrpcSettings(tls_cert=tmp_path / "no", tls_key=tmp_path / "no")),
    ):
        with pytest.raises(CannotListen):
            GrpcServer(listen, settings, GatewaySettings())
    for wrong in ({"tls_cert": tmp_path}, {"tls_client_ca": tmp_path}, {"listen": "here"}):
        with pytest.raises(ValidationError):
            GrpcSettings(**wrong)
    await server.stop()


async def test_a_deadline_cancels_the_turn(rpc: Any) -> None:
    rpc.worker.gates["token"] = asyncio.Event()
    session = await create(rpc)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await rpc.stub.SendTurn(turn(session), timeout=0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_until(lambda: rpc.worker.open_turns == 0)
    assert (await rpc.stub.GetSession(pb.GetSessionRequest(session=session))).turns == 0


async def read_metrics(rpc: Any) -> str:
    (page,) = [route for route in rpc.app.routes if route.path == "/metrics"]
    request = Request({"type": "http", "headers": []})
    return str((await page.endpoint(request)).body.decode())


async def test_a_client_that_reads_nothing_loses_its_call(new_rpc: Any) -> None:
    rpc = await new_rpc(GrpcSettings(max_calls=1), GatewaySettings(send_seconds=0.2))
    rpc.worker.script = [" ".join(["x" * 500] * 3000)]
    session = await create(rpc)
    call = rpc.stub.StreamTurn(turn(session, max_tokens=3000))
    await call.read()
    ended = 'kvrecall_grpc_calls_total{method="StreamTurn",status="UNAVAILABLE"} 1.0'
    for _ in range(WAITS):
        if ended in await read_metrics(rpc):
            break
        await asyncio.sleep(0.01)
    assert await create(rpc), "its place is free"


async def test_a_request_that_does_not_arrive_is_refused(new_rpc: Any) -> None:
    rpc = await new_rpc(None, GatewaySettings(body_seconds=0.2))

    async def never() -> Any:
        await asyncio.sleep(60)
        yield b""

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.channel.stream_unary(f"/{SERVICE}/GetModel")(never())
    assert read_status(refused.value).code == "body_timeout"


async def test_a_request_over_the_limit_is_refused(new_rpc: Any) -> None:
    rpc = await new_rpc(None, GatewaySettings(max_body_bytes=2000))
    long = [pb.Message(role=pb.ROLE_USER, content="x" * 2000)]
    session = await create(rpc)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.SendTurn(pb.SendTurnRequest(session=session, messages=long))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_over_the_limit_are_refused(new_rpc: Any) -> None:
    rpc = await new_rpc(GrpcSettings(max_calls=1))
    session = await create(rpc)
    rpc.worker.gates["token"] = asyncio.Event()
    call = rpc.stub.StreamTurn(turn(session))
    await rpc.worker.reached["token"].wait()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.GetModel(pb.GetModelRequest())
    found = read_status(refused.value)
    assert (found.code, found.retry) == ("overloaded", True)
    call.cancel()


async def test_connections_over_the_limit_are_refused(new_rpc: Any) -> None:
    rpc = await new_rpc(None, GatewaySettings(max_connections=1))
    assert await create(rpc)
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(rpc.server.address, options=own) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await SessionsStub(channel).GetModel(pb.GetModelRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_every_call_has_a_request_id_a_log_line_and_a_count(rpc: Any) -> None:
    given = (("x-request-id", "mine"),)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with capture_logs() as logs:
        call = rpc.stub.GetModel(pb.GetModelRequest(), metadata=given)
        await call
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.stub.GetSession(pb.GetSessionRequest(session="s_none"))
        await wait_until(lambda: len(logs) == 2)
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
    assert len(dict(refused.value.trailing_metadata() or ())["x-request-id"]) == 16
    seen = [(each["method"], each["status"]) for each in logs if each["event"] == "call"]
    assert seen == [("GetModel", "OK"), ("GetSession", "NOT_FOUND")]
    text = await read_metrics(rpc)
    assert 'kvrecall_grpc_calls_total{method="GetSession",status="NOT_FOUND"} 1.0' in text


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65])
async def test_a_tenants_name_is_plain(rpc: Any, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.ListSessions(
            pb.ListSessionsRequest(), metadata=(("x-kvrecall-tenant", name),)
        )
    assert read_status(refused.value).code == "invalid_request"


async def test_a_stop_lets_running_turns_end(rpc: Any) -> None:
    rpc.worker.gates["token"] = asyncio.Event()
    session = await create(rpc)
    running = asyncio.ensure_future(rpc.stub.SendTurn(turn(session)))
    await rpc.worker.reached["token"].wait()
    rpc.server.begin_stop(60.0)
    await wait_until(lambda: True)
    rpc.worker.gates["token"].set()
    assert (await running).turn == 1
    await rpc.server.stop()
