"""Several workers behind the protocol of one: each session's calls go where it was opened last."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from kvrecall.v1 import worker_pb2 as wire
from services.errors import RegistryError, ServiceError, WorkerLost, WorkerRefused
from services.grpc_worker import GrpcWorker
from services.placement import Candidate, chosen
from services.registry import Registry
from services.wire_settings import WireSettings

_log = structlog.get_logger("kvrecall.fleet")
_LAST_ANSWER_SECONDS = 1.0
_T = TypeVar("_T")
Joined = Callable[[], Awaitable[None]]


@dataclass
class _Member:
    """A worker that was reached. `well`: no call to it was lost since it was last asked how it is."""

    worker: GrpcWorker
    info: wire.WorkerInfo
    record: wire.WorkerRecord
    well: bool = True

    @property
    def name(self) -> str:
        return self.record.name


class Fleet:
    """`services.worker_client.Worker` over all workers of a registry. To be made with `Fleet.start`.

    It looks once a second who is there. The calls that run in a worker which has vanished end as lost at once. All
    workers serve one model: another one's worker is left out.
    """

    def __init__(self, registry: Registry, settings: WireSettings) -> None:
        self._registry = registry
        self._settings = settings
        self._members: dict[str, _Member] = {}
        self._strangers: dict[str, str] = {}
        self._fingerprint: str | None = None
        self._routes: dict[str, str] = {}
        self._planned: dict[str, str] = {}
        self._joined: Joined | None = None
        self._untold = False
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, registry: Registry, settings: WireSettings) -> "Fleet":
        """A fleet of which one worker was reached. Raises WorkerLost when none is within `connect_seconds`."""
        fleet = cls(registry, settings)
        try:
            async with asyncio.timeout(settings.connect_seconds):
                while not fleet._members:
                    await fleet._look()
                    if not fleet._members:
                        await asyncio.sleep(settings.watch_seconds)
        except BaseException as error:
            await fleet.close()
            if isinstance(error, TimeoutError):
                message = f"no worker was reached within {settings.connect_seconds:g} seconds"
                raise WorkerLost(message) from error
            raise
        fleet._untold = False  # whoever starts a fleet asks it itself
        fleet._watching = asyncio.create_task(fleet._watch(), name="fleet")
        return fleet

    def on_join(self, joined: Joined) -> None:
        """Call `joined` whenever a worker has come, from now on."""
        self._joined = joined

    # Who is there

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.watch_seconds)
            try:
                await self._look()
                if self._untold and self._joined is not None:
                    await self._joined()
                    self._untold = False
            except ServiceError as error:
                _log.warning("the workers are not all looked after", reason=error.message)
            except Exception:  # whatever a registry holds, the next look comes
                _log.exception("the workers could not be looked after")

    async def _look(self) -> None:
        """Learn who has come, who is gone, and what each has to do."""
        try:
            announced = {record.name: record for record in await self._registry.records()}
        except RegistryError as error:
            _log.warning("registry unread", reason=error.message)
            announced = {member.name: member.record for member in self._members.values()}
        known = [self._look_at(member, announced.get(name)) for name, member in self._members.items()]
        new = [self._join(record) for name, record in announced.items() if name not in self._members]
        await asyncio.gather(*known, *new)

    async def _look_at(self, member: _Member, record: wire.WorkerRecord | None) -> None:
        if record is not None and record.address != member.worker.address:
            await self._leave(member, "it is at another address")
            return
        if record is None or not self._registry.loads or not member.well:
            try:
                record = await member.worker.record(member.name, member.info)
            except (WorkerLost, WorkerRefused) as error:
                await self._leave(member, error.message)
                return
        if record.fingerprint != member.info.fingerprint:
            await self._leave(member, "it serves another model now")
            return
        member.record, member.well = record, True

    async def _join(self, record: wire.WorkerRecord) -> None:
        worker = GrpcWorker(self._settings.at(record.address))
        try:
            info = await worker.describe()
            loaded = await worker.record(record.name, info)
        except (WorkerLost, WorkerRefused):
            await worker.close()  # still starting, or gone: it is looked for again
            return
        if self._is_stranger(record.name, info.fingerprint):
            await worker.close()
            return
        self._members[record.name] = _Member(worker, info, loaded)
        self._untold = True
        _log.info("a worker has come", worker=record.name, address=record.address)

    def _is_stranger(self, name: str, fingerprint: str) -> bool:
        """Whether the worker serves another model than the others; the first one to be reached says which."""
        self._fingerprint = self._fingerprint or fingerprint
        if fingerprint == self._fingerprint:
            self._strangers.pop(name, None)
            return False
        if self._strangers.get(name) != fingerprint:
            self._strangers[name] = fingerprint
            _log.warning("a worker is left out: it serves another model", worker=name, fingerprint=fingerprint)
        return True

    async def _leave(self, member: _Member, why: str) -> None:
        """Forget a worker: what runs there is lost, now. One that has drained may still be telling its last answers."""
        del self._members[member.name]
        _log.warning("a worker is gone", worker=member.name, reason=why)
        await member.worker.close(_LAST_ANSWER_SECONDS if member.record.draining else 0.0)

    # Where a session is

    def place(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        """The owner while it is well; else the worker that hashing chooses among those that are, by free slots."""
        taking = [each for each in self._members.values() if not each.record.draining and each.name not in avoid]
        well = [each for each in taking if each.well] or taking
        if all(each.name != owner for each in well):
            found = chosen(session, [Candidate(each.name, each.record.free_slots) for each in well])
            if found is None:
                raise WorkerLost(f"there is no worker that takes session {session!r} now")
            owner = found
        self._planned[session] = owner
        return owner

    def _routed(self, session: str) -> _Member:
        if session not in self._routes:
            raise WorkerRefused("unknown_session", f"session {session!r} was not opened by this gateway")
        return self._named(self._routes[session])

    def _named(self, name: str) -> _Member:
        if name not in self._members:
            raise WorkerLost(f"the worker {name} is gone")
        return self._members[name]

    async def _at(self, member: _Member, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except WorkerLost:
            member.well = False
            raise

    def _opening(self, session: str) -> _Member:
        """Where the session is to be from now on."""
        self._routes[session] = self._planned.pop(session, self._routes.get(session, ""))
        return self._named(self._routes[session])

    # Calls of a session

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Open the session where it was placed."""
        member = self._opening(request.spec.session)
        return await self._at(member, member.worker.open(request))

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute lost pages again where the session was placed, and open it there."""
        member = self._opening(request.spec.session)
        return await self._at(member, member.worker.rebuild(request))

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session where its parent is open."""
        member = self._routed(request.parent)
        self._routes[request.spec.session] = member.name
        return await self._at(member, member.worker.fork(request))

    async def release(self, request: wire.ReleaseRequest) -> None:
        """Free what the workers hold of the session but for the one where it is open. Who is lost holds nothing."""
        others = [each for each in self._members.values() if each.name != self._routes.get(request.session)]
        await asyncio.gather(*(_unless_lost(self._at(each, each.worker.release(request))) for each in others))

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
        infos = [member.info for _, member in sorted(self._members.items())]
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
        for member in sorted(self._members.values(), key=lambda each: (not each.well, each.record.queued, each.name)):
            try:
                return await self._at(member, call(member.worker))
            except WorkerLost as error:
                lost = error
        raise lost

    # Calls to all workers

    async def workers(self) -> list[wire.WorkerRecord]:
        """Those that were there at the last look, as they were then."""
        return [member.record for _, member in sorted(self._members.items())]

    async def retain(self, request: wire.RetainRequest) -> None:
        """Have all drop the stored rows that belong to no session of these."""
        await self._everywhere(lambda worker: worker.retain(request))

    async def drop(self, request: wire.DropRequest) -> None:
        """Have all forget the session: whoever has rows of it, in memory or in files, drops them."""
        self._routes.pop(request.session, None)
        self._planned.pop(request.session, None)
        await self._everywhere(lambda worker: worker.drop(request))

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """Counters of all that answer."""
        found: dict[str, wire.WorkerStats] = {}

        async def ask(member: _Member) -> None:
            found[member.name] = (await self._at(member, member.worker.stats()))[member.worker.address]

        await asyncio.gather(*(_unless_lost(ask(member)) for member in self._members.values()))
        if not found:
            raise WorkerLost("no worker answers now")
        return found

    async def _everywhere(self, call: Callable[[GrpcWorker], Awaitable[None]]) -> None:
        """Ask all. Raises WorkerLost when none did it: who is away drops what is gone when it comes back."""
        members = list(self._members.values())
        calls = [self._at(member, call(member.worker)) for member in members]
        errors = [each for each in await asyncio.gather(*calls, return_exceptions=True) if each is not None]
        if len(errors) == len(members):
            raise errors[0] if errors else WorkerLost("there is no worker now")
        for error in errors:
            if not isinstance(error, WorkerLost):
                raise error

    async def close(self) -> None:
        """End the connections; the workers themselves go on."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.gather(*(member.worker.close() for member in self._members.values()))
        await self._registry.close()


async def _unless_lost(call: Awaitable[None]) -> None:
    with suppress(WorkerLost):
        await call
