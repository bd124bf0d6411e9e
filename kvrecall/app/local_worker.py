"""A worker inside this process, behind the protocol that the services speak."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.errors import WorkerError
from workers.rpc.service import WorkerService

LOCAL = "local"
"""The name of a worker that is part of its gateway's process."""


class InProcessWorker:
    """`services.cluster.worker_client.Worker`, on calls whose scheduler runs in a thread of this process."""

    def __init__(self, calls: WorkerService) -> None:
        self._calls = calls

    async def describe(self) -> wire.WorkerInfo:
        """Model, shape and limits."""
        with _told():
            return self._calls.describe()

    def place(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        """There is no choice. Raises WorkerLost when it is to be avoided."""
        if LOCAL in avoid:
            raise WorkerLost("there is no other worker")
        return LOCAL

    async def workers(self) -> list[wire.WorkerRecord]:
        """This one."""
        with _told():
            return [self._calls.record(LOCAL, "", draining=False)]

    async def retain(self, request: wire.RetainRequest) -> None:
        """Drop stored rows that belong to no session of the catalog."""
        with _told():
            await self._calls.retain(request)

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Make the session be what the request says."""
        with _told():
            return await self._calls.open(request)

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session that begins as another one was."""
        with _told():
            return await self._calls.fork(request)

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute a session's lost pages again."""
        with _told():
            return await self._calls.rebuild(request)

    async def release(self, request: wire.ReleaseRequest) -> None:
        """Let a session go that goes on elsewhere."""
        with _told():
            await self._calls.release(request)

    async def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        """Run a turn; closing the iterator cancels it."""
        with _told():
            async with aclosing(self._calls.turn(request)) as events:
                async for event in events:
                    yield event

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        """Run a repair between turns; cancelling the call cancels it."""
        with _told():
            return await self._calls.repair(request)

    async def hurry(self, request: wire.HurryRequest) -> None:
        """End the session's repairs with what they have found so far."""
        with _told():
            await self._calls.hurry(request)

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        """The text of each chunk of tokens."""
        with _told():
            return self._calls.detokenize(request)

    async def embed(self, texts: list[str]) -> wire.EmbedResult:
        """A unit vector per text."""
        with _told():
            return await self._calls.embed(wire.EmbedRequest(texts=texts))

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        """Choose the rows of each planned episode; cancelling the call cancels it."""
        with _told():
            return await self._calls.build_episodes(request)

    async def memory(self, session: str) -> wire.MemoryReport:
        """What the session holds."""
        with _told():
            return await self._calls.memory(wire.MemoryRequest(session=session))

    async def drop(self, request: wire.DropRequest) -> None:
        """Forget the session."""
        with _told():
            await self._calls.drop(request)

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """Counters for the metrics page."""
        with _told():
            return {LOCAL: self._calls.stats()}

    async def close(self) -> None:
        """Stop the worker, and close its store."""
        await self._calls.close()


@contextmanager
def _told() -> Iterator[None]:
    """The worker's errors as the services'."""
    try:
        yield
    except WorkerError as error:
        raise WorkerRefused(error.code, str(error)) from error
    except Exception as error:
        raise WorkerLost(f"the worker failed: {type(error).__name__}: {error}") from error
