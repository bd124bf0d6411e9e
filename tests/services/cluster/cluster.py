"""Scripted workers behind real servers, and a registry that they join and leave."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health, health_pb2_grpc

from kvrecall.domain.errors import RegistryError
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.pool import WorkerPool
from services.cluster.settings import WireSettings

WAY = WireSettings(watch_seconds=0.05, look_seconds=1, quick_seconds=2)


class Scripted(worker_pb2_grpc.WorkerServicer):
    """Records its calls; its turns stream one token and never end."""

    def __init__(self, model: str = "one", protocol_version: int = PROTOCOL_VERSION) -> None:
        self.model = model
        self.protocol_version = protocol_version
        self.calls: list[str] = []
        self.refuses = ""
        self.answers = asyncio.Event()
        self.answers.set()
        self.health = health.aio.HealthServicer()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            model=self.model,
            fingerprint=self.model,
            slots=4,
            max_budget=256,
            protocol_version=self.protocol_version,
        )

    async def Stats(self, request: Empty, context: Any) -> pb.WorkerStats:
        await self.answers.wait()
        return pb.WorkerStats(slots_in_use=1, sessions=3)

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.MemoryReport:
        self.calls.append(f"open {request.spec.session}")
        return pb.MemoryReport()

    async def Turn(self, request: pb.TurnRequest, context: Any) -> None:
        self.calls.append(f"turn {request.session}")
        await context.write(pb.TurnEvent(token=pb.TokenChunk(text="one")))
        await asyncio.Event().wait()

    async def Memory(self, request: pb.MemoryRequest, context: Any) -> pb.MemoryReport:
        self.calls.append(f"memory {request.session}")
        return pb.MemoryReport(length=7)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> Empty:
        self.calls.append(f"release {request.session}")
        return Empty()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> Empty:
        await self._refuse(context)
        self.calls.append(f"delete {request.session}")
        return Empty()

    async def Fork(self, request: pb.ForkRequest, context: Any) -> pb.ForkResult:
        self.calls.append(f"fork {request.spec.session}")
        return pb.ForkResult()

    async def ListPages(
        self, request: pb.ListPagesRequest, context: Any
    ) -> AsyncIterator[pb.PageList]:
        await self._refuse(context)
        self.calls.append(f"list {request.older_than_seconds:g}")
        for page in (b"p", b"q"):
            yield pb.PageList(page_ids=page * 16)

    async def DeletePages(
        self, request: pb.DeletePagesRequest, context: Any
    ) -> pb.DeletePagesResult:
        await self._refuse(context)
        self.calls.append(f"delete {request.page_ids.decode()}")
        return pb.DeletePagesResult(deleted=2)

    async def _refuse(self, context: Any) -> None:
        if self.refuses:
            await context.abort(
                grpc.StatusCode.ABORTED, "no", trailing_metadata=((REFUSAL_CODE, self.refuses),)
            )

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResult:
        self.calls.append("embed")
        return pb.EmbedResult(dimensions=3)


class Known:
    """A registry that a test writes itself."""

    loads = True

    def __init__(self) -> None:
        self.found: dict[str, pb.WorkerRecord] = {}
        self.fails = False
        self.read = asyncio.Event()

    async def records(self) -> list[pb.WorkerRecord]:
        self.read.set()
        if self.fails:
            raise RegistryError("the registry is down")
        return list(self.found.values())

    async def close(self) -> None:
        pass

    def add(self, name: str, address: str, **fields: Any) -> None:
        record = pb.WorkerRecord(
            name=name,
            address=address,
            fingerprint="one",
            slots=4,
            free_slots=4,
            protocol_version=PROTOCOL_VERSION,
        )
        record.MergeFrom(pb.WorkerRecord(**fields))
        self.found[name] = record


@asynccontextmanager
async def serving(servicer: Scripted, port: int = 0) -> AsyncIterator[str]:
    """The servicer at an address of this machine."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Cluster:
    """Workers a and b, a registry that knows them, and the pool."""

    def __init__(self) -> None:
        self.servicers = {"a": Scripted(), "b": Scripted()}
        self.known = Known()
        self.servers = {name: AsyncExitStack() for name in self.servicers}
        self.pool: WorkerPool

    async def open(self, session: str, worker: str, avoid: Sequence[str] = ()) -> str:
        """Choose a worker for a session and open it there; returns its name."""
        placed = self.pool.choose_worker(session, worker, avoid)
        await self.pool.open(pb.OpenRequest(spec=pb.SessionSpec(session=session)))
        return placed

    async def open_in_family(self, session: str, family: str) -> str:
        """Open a new session in the worker that its prompt family has now; returns its name."""
        placed = self.pool.choose_worker(session, "", (), family)
        await self.pool.open(pb.OpenRequest(spec=pb.SessionSpec(session=session)))
        return placed

    async def refreshed(self) -> None:
        """Return when the pool has refreshed with the registry as it is now."""
        for _ in range(2):
            self.known.read.clear()
            await self.known.read.wait()
        await asyncio.sleep(0.05)

    async def names(self) -> list[str]:
        return [each.name for each in await self.pool.workers()]
