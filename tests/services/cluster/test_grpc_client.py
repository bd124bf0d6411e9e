"""The way to a worker over the network.

What becomes of statuses, deadlines, lost connections and certificates.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.empty_pb2 import Empty

from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.settings import WireSettings

HERE = "127.0.0.1:0"


class Scripted(worker_pb2_grpc.WorkerServicer):
    """Ends calls with `status`.

    Repairs and turns run until they are cancelled, which sets `cancelled`.
    """

    def __init__(self) -> None:
        self.status = grpc.StatusCode.OK
        self.code = ""
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()
        self.order: list[str] = []

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(model="scripted")

    async def Memory(self, request: pb.MemoryRequest, context: Any) -> pb.MemoryReport:
        await self._end(context)
        return pb.MemoryReport(length=7)

    async def Turn(self, request: pb.TurnRequest, context: Any) -> None:
        try:  # the cancellation may arrive while the event is written
            await context.write(pb.TurnEvent(token=pb.TokenChunk(text="one")))
            await self._end(context)
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def Repair(self, request: pb.RepairRequest, context: Any) -> None:
        self.order.append("repair")
        self.started.set()
        try:
            await context.write(pb.RepairEvent(accepted=True))
            await self.stopped.wait()
            await context.write(pb.RepairEvent(result=pb.RepairResult()))
        finally:
            self.cancelled.set()

    async def StopEarly(self, request: pb.StopEarlyRequest, context: Any) -> Empty:
        self.order.append("stop")
        self.stopped.set()
        return Empty()

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.MemoryReport:
        await asyncio.sleep(0.05)
        self.cancelled.set()
        return pb.MemoryReport(length=len(request.state.selection))

    async def _end(self, context: Any) -> None:
        if self.status is not grpc.StatusCode.OK:
            refused = ((REFUSAL_CODE, self.code),) if self.code else ()
            await context.abort(self.status, "a reason", trailing_metadata=refused)


@asynccontextmanager
async def connected(
    listen: str = HERE, credentials: grpc.ServerCredentials | None = None, **settings: Any
) -> AsyncIterator[tuple[Scripted, GrpcWorkerClient]]:
    """A scripted worker behind a server, and a client of it."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    servicer = Scripted()
    port = (
        server.add_secure_port(listen, credentials)
        if credentials
        else server.add_insecure_port(listen)
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    await server.start()
    worker = GrpcWorkerClient(WireSettings(worker=f"localhost:{port}", **settings))
    try:
        yield servicer, worker
    finally:
        await worker.close()
        await server.stop(None)


async def test_a_code_in_the_trailers_is_a_refusal_whatever_the_status() -> None:
    async with connected() as (servicer, worker):
        servicer.status = grpc.StatusCode.INTERNAL
        servicer.code = "storage_failed"
        with pytest.raises(WorkerRefused) as refused:
            await worker.memory("s")
        assert (refused.value.code, refused.value.message) == ("storage_failed", "a reason")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (grpc.StatusCode.INTERNAL, "failed: a reason"),
        (grpc.StatusCode.UNAVAILABLE, "cannot be reached: a reason"),
        (grpc.StatusCode.CANCELLED, "cancelled the call"),
        (grpc.StatusCode.UNKNOWN, "answered unknown: a reason"),
    ],
)
async def test_a_status_of_the_connection_is_a_lost_worker(
    status: grpc.StatusCode, message: str
) -> None:
    async with connected() as (servicer, worker):
        servicer.status = status
        with pytest.raises(WorkerLost, match=message):
            await worker.memory("s")
        turn = worker.turn(pb.TurnRequest(session="s"))
        assert (await anext(turn)).token.text == "one"
        with pytest.raises(WorkerLost, match=message):
            await anext(turn)


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED]
)
async def test_a_call_that_the_worker_cannot_take_is_refused(status: grpc.StatusCode) -> None:
    async with connected() as (servicer, worker):
        servicer.status = status
        with pytest.raises(WorkerRefused, match=f"{status.name.lower()}: a reason") as refused:
            await worker.memory("s")
        assert refused.value.code == "worker_error"


async def test_a_call_past_its_deadline_is_cancelled_on_both_sides() -> None:
    async with connected(repair_seconds=0.1) as (servicer, worker):
        with pytest.raises(WorkerLost, match="did not answer in time"):
            await worker.repair(pb.RepairRequest(session="s"))
        if servicer.started.is_set():  # on a slow machine it may not have arrived
            await servicer.cancelled.wait()
        assert (await worker.memory("s")).length == 7


async def test_closing_a_turn_cancels_it() -> None:
    async with connected() as (servicer, worker):
        async with aclosing(worker.turn(pb.TurnRequest(session="s"))) as turn:
            await anext(turn)
        await servicer.cancelled.wait()


async def test_cancelling_a_repair_cancels_it() -> None:
    async with connected() as (servicer, worker):
        repair = asyncio.create_task(worker.repair(pb.RepairRequest(session="s")))
        await servicer.started.wait()
        repair.cancel()
        with pytest.raises(asyncio.CancelledError):
            await repair
        await servicer.cancelled.wait()


async def test_a_stop_never_overtakes_its_repair() -> None:
    async with connected() as (servicer, worker):
        for _ in range(50):
            servicer.order.clear()
            servicer.stopped.clear()
            repair = asyncio.create_task(
                worker.repair(pb.RepairRequest(session="s", text="much " * 50_000))
            )
            await asyncio.sleep(0)
            await worker.stop_early(pb.StopEarlyRequest(session="s"))
            await repair
            assert servicer.order == ["repair", "stop"]
        await worker.stop_early(pb.StopEarlyRequest(session="s"))


async def test_a_cancelled_open_is_waited_for() -> None:
    async with connected() as (servicer, worker):
        opening = asyncio.create_task(worker.open(pb.OpenRequest()))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert servicer.cancelled.is_set()


async def test_a_state_of_many_megabytes_is_sent_and_one_over_the_limit_is_refused() -> None:
    state = pb.SessionState(selection=bytes(20 << 20))
    async with connected() as (_, worker):
        assert (await worker.open(pb.OpenRequest(state=state))).length == 20 << 20
    async with connected(max_message_bytes=1 << 20) as (_, worker):
        with pytest.raises(WorkerRefused, match="resource_exhausted"):
            await worker.open(pb.OpenRequest(state=state))


async def test_a_client_reconnects_to_a_worker_that_is_back() -> None:
    async with connected() as (_, first):
        pass
    with pytest.raises(WorkerLost, match="closed"):
        await first.memory("s")
    async with connected(reconnect_seconds=0.1) as (_, worker):
        address = worker.address
        lonely = GrpcWorkerClient(WireSettings(worker=address, reconnect_seconds=0.1))
        await lonely.memory("s")
    with pytest.raises(WorkerLost):
        await lonely.memory("s")
    waiting = asyncio.create_task(lonely.describe())
    async with connected(listen=address):
        assert (await waiting).model == "scripted"
        assert (await lonely.memory("s")).length == 7
    await lonely.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """certificates(name).

    An authority of that name, and a key and a certificate for this machine by it.
    """
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str) -> dict[str, Path]:
        paths = {what: folder / f"{name}-{what}.pem" for what in ("ca", "cert", "key")}
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        authority.cert_pem.write_to_path(paths["ca"])
        issued.private_key_pem.write_to_path(paths["key"])
        issued.cert_chain_pems[0].write_to_path(paths["cert"])
        return {f"tls_{what}": path for what, path in paths.items()}

    return make


async def test_only_matching_certificates_connect(
    certificates: Callable[[str], dict[str, Path]],
) -> None:
    ours = certificates("ours")
    others = certificates("others")
    ca_only = {"tls_ca": ours["tls_ca"]}
    chain = [(ours["tls_key"].read_bytes(), ours["tls_cert"].read_bytes())]
    mutual = grpc.ssl_server_credentials(
        chain, ours["tls_ca"].read_bytes(), require_client_auth=True
    )
    one_way = grpc.ssl_server_credentials(chain)
    cases: list[tuple[grpc.ServerCredentials | None, dict[str, Any], bool]] = [
        (one_way, ca_only, True),
        (one_way, {}, False),
        (one_way, {"tls_ca": others["tls_ca"]}, False),
        (None, ca_only, False),
        (mutual, ours, True),
        (mutual, ca_only, False),
        (mutual, {**others, "tls_ca": ours["tls_ca"]}, False),
    ]
    for credentials, settings, right in cases:
        async with connected(credentials=credentials, **settings) as (_, worker):
            if right:
                assert (await worker.memory("s")).length == 7
            else:
                with pytest.raises(WorkerLost, match="cannot be reached"):
                    await worker.memory("s")


@pytest.mark.parametrize("half", ["tls_cert", "tls_key"])
def test_half_of_a_pair_of_certificate_and_key_is_refused(half: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {half: tmp_path, "tls_ca": tmp_path}
    with pytest.raises(ValueError, match="belong together"):
        WireSettings(**files)
