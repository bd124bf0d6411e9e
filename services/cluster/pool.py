"""Several workers behind the protocol of one: calls go to the worker that has the session."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.calls import Call, RequestT, ResponseT
from kvrecall.protocol.certificates import read_channel
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.membership import Joined, Membership, Node
from services.cluster.placement import Candidate, choose
from services.cluster.registry import Registry
from services.cluster.settings import WireSettings
from services.cluster.worker_client import WorkerCalls

_T = TypeVar("_T")


class WorkerPool(WorkerCalls):
    """`services.cluster.worker_client.Worker` over all workers of a registry; see `start`.

    Calls that run in a worker that vanishes fail as lost at once.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._routes: dict[str, str] = {}
        self._chosen: dict[str, str] = {}
        self._holders: dict[str, set[str]] = {}
        self._turning: set[str] = set()

    @classmethod
    async def start(
        cls, registry: Registry, settings: WireSettings, catalog: str = ""
    ) -> "WorkerPool":
        """Build a pool of the workers that answer now, for the gateways of a catalog.

        The others join when they answer; calls are refused as lost while there is none. Raises
        OSError when a certificate cannot be read.
        """
        read_channel(settings)
        membership = Membership(registry, settings, catalog)
        await membership.start()
        return cls(membership)

    def on_join(self, joined: Joined) -> None:
        """Call `joined` after each join of a worker, from now on."""
        self._membership.joined = joined

    @property
    def _nodes(self) -> list[Node]:
        return [node for _, node in sorted(self._membership.by_name.items())]

    # Routing

    def choose_worker(
        self, session: str, owner: str, avoid: Sequence[str] = (), family: str = ""
    ) -> str:
        """Choose a healthy owner; else a worker by hashing, bounded by its share of the turns.

        Turns of this gateway count: where each keeps its own within their shares, all are.
        """
        nodes = [
            node for node in self._nodes if not node.record.draining and node.name not in avoid
        ]
        healthy = [node for node in nodes if node.healthy] or nodes
        if all(node.name != owner for node in healthy):
            turns = self._count_turns(session)
            chosen = choose(
                family or session,
                [Candidate(node.name, node.record.slots, turns[node.name]) for node in healthy],
            )
            if chosen is None:
                raise WorkerLost(f"there is no worker that takes session {session!r} now")
            owner = chosen
        self._chosen[session] = owner
        return owner

    @contextmanager
    def count_turn(self, session: str) -> Iterator[None]:
        """See `Worker.count_turn`."""
        self._turning.add(session)
        try:
            yield
        finally:
            self._turning.discard(session)

    def _count_turns(self, besides: str) -> Counter[str]:
        """Count the turns that are on their way in each worker, but for one session's."""
        sessions = self._turning - {besides}
        return Counter(self._chosen.get(each, self._routes.get(each, "")) for each in sessions)

    async def call(self, call: Call[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Send the request to its session's worker, or to any worker; see `WorkerCalls.call`."""
        if call.session is not None:
            node = self._get_route(call.session(request))
            return await self._watch_loss(node, node.worker.call(call, request))
        assert call.any_worker, f"the pool has a method of its own for {call.name}"
        return await self._call_anywhere(lambda worker: worker.call(call, request))

    async def stream(
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """Send the request to its session's worker; see `WorkerCalls.stream`."""
        assert call.session is not None, "streaming calls are bound to a session"
        node = self._get_route(call.session(request))
        try:
            async with aclosing(node.worker.stream(call, request)) as events:
                async for event in events:
                    yield event
        except WorkerLost:
            node.healthy = False
            raise

    def _get_route(self, session: str) -> Node:
        if session not in self._routes:
            raise WorkerRefused(
                ErrorCode.SESSION_NOT_OPEN, f"session {session!r} was not opened by this gateway"
            )
        return self._get_node(self._routes[session])

    def _get_node(self, name: str) -> Node:
        if name not in self._membership.by_name:
            raise WorkerLost(f"the worker {name} is gone")
        return self._membership.by_name[name]

    async def _watch_loss(self, node: Node, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except WorkerLost:
            node.healthy = False
            raise

    async def _call_anywhere(self, call: Callable[[GrpcWorkerClient], Awaitable[_T]]) -> _T:
        """Call the worker with the shortest queue, and the next one if it is lost."""
        lost = WorkerLost(self._membership.describe_absence())
        by_load = sorted(
            self._nodes, key=lambda node: (not node.healthy, node.record.queued, node.name)
        )
        for node in by_load:
            try:
                return await self._watch_loss(node, call(node.worker))
            except WorkerLost as error:
                lost = error
        raise lost

    # Calls that open a session

    async def open(self, request: pb.OpenRequest) -> pb.MemoryReport:
        """Open the session in the worker that was chosen for it."""
        return await self._open_in_chosen(request.spec, lambda worker: worker.open(request))

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """Rebuild and open the session in the worker that was chosen for it."""
        return await self._open_in_chosen(request.spec, lambda worker: worker.rebuild(request))

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """Replay and open the session in the worker that was chosen for it."""
        return await self._open_in_chosen(request.spec, lambda worker: worker.fork(request))

    async def _open_in_chosen(
        self, spec: pb.SessionSpec, call: Callable[[GrpcWorkerClient], Awaitable[_T]]
    ) -> _T:
        """Open a session in the chosen worker; others where this gateway opened it release it."""
        session = spec.session
        name = self._chosen.pop(session, self._routes.get(session, ""))
        self._routes[session] = name
        node = self._get_node(name)
        self._membership.cancel_release(name, session)
        holders = self._holders.setdefault(session, set())
        others = holders - {name}
        holders.add(name)
        answer = await self._watch_loss(node, call(node.worker))
        release = pb.ReleaseRequest(session=session, epoch=spec.epoch)
        for other in others:
            self._membership.schedule_release(other, session, release)
        holders -= others
        return answer

    # Calls to a named worker

    async def list_pages(
        self, worker: str, request: pb.ListPagesRequest
    ) -> AsyncGenerator[pb.PageList, None]:
        """List the named worker's pages."""
        node = self._get_node(worker)
        async with (
            self._watch_mismatch(node),
            aclosing(node.worker.list_pages(worker, request)) as parts,
        ):
            async for part in parts:
                yield part

    async def delete_pages(
        self, request: pb.DeletePagesRequest, worker: str = ""
    ) -> pb.DeletePagesResult:
        """Delete pages in the named worker, or in all. Raises WorkerLost unless all answered."""
        nodes = [self._get_node(worker)] if worker else self._nodes
        if not nodes:
            raise WorkerLost(self._membership.describe_absence())
        results = await asyncio.gather(
            *(self._watch_loss(node, self._delete_pages_in(node, request)) for node in nodes),
            return_exceptions=True,
        )
        for result in results:  # all have ended: none is left behind by the failure of another
            if isinstance(result, BaseException):
                raise result
        return pb.DeletePagesResult(
            deleted=sum(each.deleted for each in results if isinstance(each, pb.DeletePagesResult))
        )

    async def _delete_pages_in(
        self, node: Node, request: pb.DeletePagesRequest
    ) -> pb.DeletePagesResult:
        async with self._watch_mismatch(node):
            return await node.worker.delete_pages(request)

    @asynccontextmanager
    async def _watch_mismatch(self, node: Node) -> AsyncIterator[None]:
        """Leave a worker out that was replaced by one of another catalog."""
        try:
            yield
        except WorkerRefused as refusal:
            if refusal.code is ErrorCode.CATALOG_MISMATCH:
                await self._membership.exclude(node, refusal.message)
            raise

    # Calls to all workers

    async def describe(self) -> pb.WorkerInfo:
        """Model and shape, which are the same everywhere, with limits that hold in every worker."""
        infos = [node.info for node in self._nodes]
        if not infos:
            raise WorkerLost(self._membership.describe_absence())
        described = pb.WorkerInfo()
        described.CopyFrom(infos[0])
        described.max_budget = min(info.max_budget for info in infos)
        described.slots = sum(info.slots for info in infos)
        described.max_session_tokens = min(info.max_session_tokens for info in infos)
        return described

    async def workers(self) -> list[pb.WorkerRecord]:
        """The records of the last refresh."""
        return [node.record for node in self._nodes]

    async def release(self, request: pb.ReleaseRequest) -> None:
        """Release the session in all workers but the one where it is open; ignore lost workers."""
        route = self._routes.get(request.session)
        others = [node for node in self._nodes if node.name != route]
        await asyncio.gather(
            *(_unless_lost(self._watch_loss(node, node.worker.release(request))) for node in others)
        )

    async def delete(self, request: pb.DeleteRequest) -> None:
        """Free the deleted session in all workers.

        Workers that are away get the request when they are back. Raises WorkerRefused, and
        WorkerLost unless all workers that are here answered.
        """
        session = request.session
        nodes = self._nodes
        self._routes.pop(session, None)
        self._chosen.pop(session, None)
        answered = await asyncio.gather(
            *(_unless_lost(self._watch_loss(node, node.worker.delete(request))) for node in nodes)
        )
        deleted = {node.name for node, is_done in zip(nodes, answered, strict=True) if is_done}
        holders = self._holders.pop(session, set())
        for name in ({node.name for node in nodes} | holders) - deleted:
            self._membership.schedule_release(name, session, request)
        if not deleted or len(deleted) < len(nodes):
            raise WorkerLost(f"of {len(nodes)} workers {len(deleted)} answer now")

    async def stats(self) -> dict[str, pb.WorkerStats]:
        """Counters of all workers that answer."""
        by_name: dict[str, pb.WorkerStats] = {}

        async def ask(node: Node) -> None:
            with suppress(WorkerRefused):  # it counts as one that does not answer
                stats = await self._watch_loss(node, node.worker.stats())
                by_name[node.name] = stats[node.worker.address]

        await asyncio.gather(*(_unless_lost(ask(node)) for node in self._nodes))
        if not by_name:
            absent = not self._nodes
            raise WorkerLost(
                self._membership.describe_absence() if absent else "no worker answers now"
            )
        return by_name

    def forget(self, session: str) -> None:
        """See `Worker.forget`."""
        self._routes.pop(session, None)
        self._chosen.pop(session, None)
        self._holders.pop(session, None)

    async def close(self) -> None:
        """Close the connections; the workers themselves run on."""
        await self._membership.close()


async def _unless_lost(call: Awaitable[None]) -> bool:
    """Wait for a call; False if its worker is lost."""
    with suppress(WorkerLost):
        await call
        return True
    return False
