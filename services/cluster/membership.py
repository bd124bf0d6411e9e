"""The workers that a gateway has reached: who comes, who is gone, and what each is still to be told."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import RegistryError, ServiceError, WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.cluster.grpc_client import GrpcWorker
from services.cluster.registry import Registry
from services.cluster.settings import WireSettings

_log = structlog.get_logger("kvrecall.fleet")
_LAST_ANSWER_SECONDS = 1.0
_PASSING = frozenset({ErrorCode.STORAGE_FAILED, ErrorCode.CANCELLED, ErrorCode.OVERLOADED})
"""Codes of refusals after which a worker is told again at the next look."""
Joined = Callable[[], Awaitable[None]]
Parting = wire.DropRequest | wire.ReleaseRequest
"""A session that a worker is to forget: it is gone, or goes on elsewhere."""


@dataclass
class Node:
    """A worker that was reached. `well`: no call to it was lost since it was last asked how it is."""

    worker: GrpcWorker
    info: wire.WorkerInfo
    record: wire.WorkerRecord
    well: bool = True

    @property
    def name(self) -> str:
        """What the registry calls it."""
        return self.record.name


@dataclass
class Membership:
    """All of them by name. It looks every second who is there; a look also tells them what can wait.

    All serve one model: another one's worker is left out.
    """

    registry: Registry
    settings: WireSettings
    by_name: dict[str, Node] = field(default_factory=dict)
    joined: Joined | None = None
    _fingerprint: str | None = None
    _strangers: dict[str, str] = field(default_factory=dict)
    _partings: dict[str, dict[str, Parting]] = field(default_factory=dict)
    _tried: tuple[str, ...] = ()
    _untold: bool = False
    _closed: bool = False
    _watching: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Return when one worker was reached, and go on looking. Raises WorkerLost after `connect_seconds`."""
        try:
            async with asyncio.timeout(self.settings.connect_seconds):
                await self._look()
                while not self.by_name:
                    await asyncio.sleep(self.settings.watch_seconds)
                    await self._look()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise WorkerLost(self._nobody()) from error
            raise
        self._untold = False  # whoever starts asks the workers itself
        self._watching = asyncio.create_task(self._watch(), name="workers")

    def _nobody(self) -> str:
        places = ", ".join(self._tried) or "none was announced"
        return f"no worker was reached within {self.settings.connect_seconds:g} seconds ({places})"

    def part(self, name: str, session: str, parting: Parting) -> None:
        """Have a worker forget a session, as soon as it can be told."""
        self._partings.setdefault(name, {})[session] = parting

    def keep(self, name: str, session: str) -> None:
        """The session is in this worker again."""
        self._partings.get(name, {}).pop(session, None)

    async def close(self) -> None:
        """Look no more, and end the connections; the workers themselves go on."""
        self._closed = (
            True  # the registry's client may lose a cancellation: then this ends the watch
        )
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.gather(*(member.worker.close() for member in self.by_name.values()))
        await self.registry.close()

    async def _watch(self) -> None:
        while not self._closed:
            await asyncio.sleep(self.settings.watch_seconds)
            try:
                await self._look()
                if self._untold and self.joined is not None:
                    await self.joined()
                    self._untold = False
            except ServiceError as error:
                _log.warning("the workers are not all looked after", reason=error.message)
            except Exception:  # whatever a registry holds, the next look comes
                _log.exception("the workers could not be looked after")

    async def _look(self) -> None:
        """Learn who has come, who is gone, and what each has to do."""
        try:
            announced = {record.name: record for record in await self.registry.records()}
        except RegistryError as error:
            _log.warning("registry unread", reason=error.message)
            announced = {member.name: member.record for member in self.by_name.values()}
        self._tried = tuple(record.address for record in announced.values())
        known = [
            self._look_at(member, announced.get(name)) for name, member in self.by_name.items()
        ]
        new = [self._join(record) for name, record in announced.items() if name not in self.by_name]
        await asyncio.gather(*known, *new)

    async def _look_at(self, member: Node, record: wire.WorkerRecord | None) -> None:
        """How a worker is. One that is not announced any more, or that a call was lost to, is asked itself."""
        if record is not None and record.address != member.worker.address:
            await self._leave(member, "it is at another address")
            return
        if record is None or not self.registry.loads or not member.well:
            try:
                record = await member.worker.record(member.name, member.info)
            except (WorkerLost, WorkerRefused) as error:
                await self._leave(member, error.message)
                return
        if record.fingerprint != member.info.fingerprint:
            await self._leave(member, "it serves another model now")
            return
        member.record = record
        member.well = True
        with suppress(WorkerLost):  # it is told at the next look
            await self._tell(member)

    async def _tell(self, member: Node) -> None:
        """Have a worker forget what it is to forget."""
        partings = self._partings.get(member.name, {})
        for session, parting in list(partings.items()):
            try:
                if isinstance(parting, wire.DropRequest):
                    await member.worker.drop(parting)
                else:
                    await member.worker.release(parting)
            except WorkerRefused as refusal:
                if refusal.code in _PASSING:
                    continue
                _log.info(
                    "a worker keeps a session",
                    worker=member.name,
                    session=session,
                    reason=refusal.message,
                )
            if partings.get(session) is parting:
                del partings[session]

    async def _join(self, record: wire.WorkerRecord) -> None:
        worker = GrpcWorker(self.settings.at(record.address))
        try:
            info = await worker.describe()
            loaded = await worker.record(record.name, info)
        except (WorkerLost, WorkerRefused):
            await worker.close()  # still starting, or gone: it is looked for again
            return
        if self._is_stranger(record.name, info.fingerprint):
            await worker.close()
            return
        self.by_name[record.name] = Node(worker, info, loaded)
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
            _log.warning(
                "a worker is left out: it serves another model",
                worker=name,
                fingerprint=fingerprint,
            )
        return True

    async def _leave(self, member: Node, why: str) -> None:
        """Forget a worker: what runs there is lost, now. One that has drained may still be telling its last answers."""
        del self.by_name[member.name]
        _log.warning("a worker is gone", worker=member.name, reason=why)
        await member.worker.close(_LAST_ANSWER_SECONDS if member.record.draining else 0.0)
