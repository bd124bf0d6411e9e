"""A worker inside this process, behind the protocol of the services."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from google.protobuf.empty_pb2 import Empty

from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol import calls
from kvrecall.protocol.calls import Call, RequestT, ResponseT
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.worker_client import WorkerCalls
from workers.errors import WorkerError
from workers.rpc.refusals import refusing
from workers.rpc.service import WorkerService

LOCAL = "local"
"""Name of a worker in its gateway's process."""


class LocalWorkerClient(WorkerCalls):
    """`services.cluster.worker_client.Worker` over a scheduler in a thread of this process."""

    def __init__(self, service: WorkerService, catalog: str = "") -> None:
        self._service = service
        self.catalog = catalog

    def choose_worker(
        self, session: str, owner: str, avoid: Sequence[str] = (), family: str = ""
    ) -> str:
        """Choose this worker. Raises WorkerLost if it is to be avoided."""
        if LOCAL in avoid:
            raise WorkerLost("there is no other worker")
        return LOCAL

    def forget(self, session: str) -> None:
        """Do nothing: a client of one worker keeps nothing of a session."""

    async def workers(self) -> list[pb.WorkerRecord]:
        """This worker's record."""
        with _map_errors():
            return [self._service.record(LOCAL, "", draining=False)]

    async def stats(self) -> dict[str, pb.WorkerStats]:
        """See `Worker.stats`."""
        return {LOCAL: await self.call(calls.STATS, Empty())}

    async def call(self, call: Call[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """See `WorkerCalls.call`."""
        with _map_errors():
            return await self._service.handler(call)(request)

    async def stream(
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """See `WorkerCalls.stream`."""
        with _map_errors():
            async with aclosing(self._service.stream_handler(call)(request)) as events:
                async for event in events:
                    yield event

    async def close(self) -> None:
        """Stop the worker, and close its store."""
        await self._service.close()


@contextmanager
def _map_errors() -> Iterator[None]:
    """Map the worker's errors to the services'."""
    try:
        with refusing():
            yield
    except WorkerError as error:
        raise WorkerRefused(error.code, str(error)) from error
