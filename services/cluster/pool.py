"""Several workers behind the protocol of one: each session's calls go where it was opened last."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.cluster.grpc_client import GrpcWorker
from services.cluster.membership import Joined, Membership, Node
from services.cluster.placement import Candidate, chosen
from services.cluster.registry import Registry
from services.cluster.settings import WireSettings

_T = TypeVar("_T")


class WorkerPool:
    """`services.cluster.worker_client.Worker` over all workers of a registry. To be made with `WorkerPool.start`.

    The calls that run in a worker which has vanished end as lost at once.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._routes: dict[str, str] = {}
        self._planned: dict[str, str] = {}
        self._holders: dict[str, set[str]] = {}

    @classmethod
    async def start(cls, registry: Registry, settings: WireSettings) -> "WorkerPool":
        """A fleet of which one worker was reached. Raises WorkerLost when none is within `connect_seconds`."""
        members = Membership(registry, settings)
        await members.start()
        return cls(members)

    def on_join(self, joined: Joined) -> None:
        """Call `joined` whenever a worker has come, from now on."""
        self._members.joined = joined

    @property
    def _all(self) -> list[Node]:
        return [member for _, member in sorted(self._members.by_name.items())]

    # Where a session is

    def place(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        """The owner while it is well; else the worker that hashing chooses among those that are, by free slots."""
        taking = [each for each in self._all if not each.record.draining and each.name not in avoid]
        well = [each for each in taking if each.well] or taking
        if all(each.name != owner for each in well):
            found = chosen(session, [Candidate(each.name, each.record.free_slots) for each in well])
            if found is None:
                raise WorkerLost(f"there is no worker that takes session {session!r} now")
            owner = found
        self._planned[session] = owner
        return owner

    def _routed(self, session: str) -> Node:
        if session not in self._routes:
            raise WorkerRefused(
                ErrorCode.SESSION_NOT_OPEN, f"session {session!r} was not opened by this gateway"
            )
        return self._named(self._routes[session])

    def _named(self, name: str) -> Node:
        if name not in self._members.by_name:
            raise WorkerLost(f"the worker {name} is gone")
        return self._members.by_name[name]

    async def _at(self, member: Node, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except WorkerLost:
            member.well = False
            raise

    async def _opened(
        self, spec: wire.SessionSpec, call: Callable[[GrpcWorker], Awaitable[_T]]
    ) -> _T:
        """Open a session where it was placed; whoever else this gateway opened it in lets it go."""
        session = spec.session
        name = self._routes[session] = self._planned.pop(session, self._routes.get(session, ""))
        member = self._named(name)
        self._members.keep(name, session)
        holders = self._holders.setdefault(session, set())
        others = holders - {name}
        holders.add(name)
        answer = await self._at(member, call(member.worker))
        for other in others:
            self._members.part(
                other, session, wire.ReleaseRequest(session=session, epoch=spec.epoch)
            )
        holders -= others
        return answer

    # Calls of a session

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Open the session where it was placed."""
        return await self._opened(request.spec, lambda worker: worker.open(request))

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute lost pages again where the session was placed, and open it there."""
        return await self._opened(request.spec, lambda worker: worker.rebuild(request))

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session where its parent is open."""
        member = self._routed(request.parent)
        self._routes[request.spec.session] = member.name
        self._holders[request.spec.session] = {member.name}
        return await self._at(member, member.worker.fork(request))

    async def release(self, request: wire.ReleaseRequest) -> None:
        """Free what the workers hold of the session but for the one where it is open. Who is lost holds nothing."""
        others = [each for each in self._all if each.name != self._routes.get(request.session)]
        await asyncio.gather(
            *(_unless_lost(self._at(each, each.worker.release(request))) for each in others)
        )

    async def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        """Run a turn; closing the iterator cancels it."""
        member = self._routed(request.session)
        try:
            async with aclosing(member.worker.turn(request)) as events:
                async for event in events:
                    yield event
        except WorkerLost:
            member.well = False
            raise

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        """Run a repair between turns; cancelling the call cancels it."""
        member = self._routed(request.session)
        return await self._at(member, member.worker.repair(request))

    async def hurry(self, request: wire.HurryRequest) -> None:
        """End the session's repairs with what they have found so far."""
        member = self._routed(request.session)
        await self._at(member, member.worker.hurry(request))

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        """Choose the rows of each planned episode; cancelling the call cancels it."""
        member = self._routed(request.session)
        return await self._at(member, member.worker.build_episodes(request))

    async def memory(self, session: str) -> wire.MemoryReport:
        """What the session holds."""
        member = self._routed(session)
        return await self._at(member, member.worker.memory(session))

    # Calls that any worker can answer

    async def describe(self) -> wire.WorkerInfo:
        """Model and shape, which are the same everywhere, with the limits that every worker keeps to."""
        infos = [member.info for member in self._all]
        if not infos:
            raise WorkerLost("there is no worker now")
        described = wire.WorkerInfo()
        described.CopyFrom(infos[0])
        described.max_budget = min(info.max_budget for info in infos)
        described.slots = sum(info.slots for info in infos)
        return described

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        """The text of each chunk of tokens."""
        return await self._anywhere(lambda worker: worker.detokenize(request))

    async def embed(self, texts: list[str]) -> wire.EmbedResult:
        """A unit vector per text."""
        return await self._anywhere(lambda worker: worker.embed(texts))

    async def _anywhere(self, call: Callable[[GrpcWorker], Awaitable[_T]]) -> _T:
        """Ask the worker with the least to do, and the next one if it is lost."""
        lost = WorkerLost("there is no worker now")
        for member in sorted(
            self._all, key=lambda each: (not each.well, each.record.queued, each.name)
        ):
            try:
                return await self._at(member, call(member.worker))
            except WorkerLost as error:
                lost = error
        raise lost

    # Calls to all workers

    async def workers(self) -> list[wire.WorkerRecord]:
        """Those that were there at the last look, as they were then."""
        return [member.record for member in self._all]

    async def retain(self, request: wire.RetainRequest) -> None:
        """Have all drop the stored rows that belong to no session of these. Raises WorkerLost when none did."""
        done = await asyncio.gather(
            *(_unless_lost(self._at(m, m.worker.retain(request))) for m in self._all)
        )
        if not any(done):
            raise WorkerLost("no worker answers now")

    async def drop(self, request: wire.DropRequest) -> None:
        """Have all forget the session: whoever has rows of it, in memory or in files, drops them.

        Who is away is told when it comes back. Raises WorkerLost unless all that are here did it, WorkerRefused.
        """
        session = request.session
        members = self._all
        self._routes.pop(session, None)
        self._planned.pop(session, None)
        calls = [
            _unless_lost(self._at(member, _dropped(member.worker, request))) for member in members
        ]
        done = await asyncio.gather(*calls)
        told = {member.name for member, dropped in zip(members, done, strict=True) if dropped}
        for name in (
            {member.name for member in members} | self._holders.pop(session, set())
        ) - told:
            self._members.part(name, session, request)
        if not told or len(told) < len(members):
            raise WorkerLost(f"of {len(members)} workers {len(told)} answer now")

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """Counters of all that answer."""
        found: dict[str, wire.WorkerStats] = {}

        async def ask(member: Node) -> None:
            found[member.name] = (await self._at(member, member.worker.stats()))[
                member.worker.address
            ]

        await asyncio.gather(*(_unless_lost(ask(member)) for member in self._all))
        if not found:
            raise WorkerLost("no worker answers now")
        return found

    async def close(self) -> None:
        """End the connections; the workers themselves go on."""
        await self._members.close()


async def _dropped(worker: GrpcWorker, request: wire.DropRequest) -> None:
    """Drop a session; a worker that it was taken over from drops what is its own, and whoever took it over the rest."""
    try:
        await worker.drop(request)
    except WorkerRefused as refusal:
        if refusal.code is not ErrorCode.STALE_EPOCH:
            raise


async def _unless_lost(call: Awaitable[None]) -> bool:
    """Whether the call was made; False when its worker is lost."""
    with suppress(WorkerLost):
        await call
        return True
    return False
