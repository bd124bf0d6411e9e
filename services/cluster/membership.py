"""The workers that a gateway is connected to: joins, failures and pending releases."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import RegistryError, WorkerLost, WorkerRefused
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.outage import Outage
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.registry import Registry
from services.cluster.settings import WireSettings

_log = structlog.get_logger("kvrecall.cluster")
_LAST_ANSWER_SECONDS = 1.0
# Scheduled releases that are kept per worker, and workers that they are kept of.
_MAX_RELEASES = 1000
_MAX_RELEASED_WORKERS = 256
# Codes of refusals after which a release is sent again at the next refresh.
_RETRIED = frozenset(
    {
        ErrorCode.STORAGE_FAILED,
        ErrorCode.CANCELLED,
        ErrorCode.OVERLOADED,
        ErrorCode.WORKER_ERROR,
    }
)
Joined = Callable[[str], Awaitable[None]]
"""Called with the name of a worker that joined."""
PendingRelease = pb.DeleteRequest | pb.ReleaseRequest
"""A session that a worker is to free: it is deleted, or moved to another worker."""


@dataclass
class Node:
    """A connected worker. `healthy`: no call to it was lost, or slow, since its last refresh."""

    worker: GrpcWorkerClient
    info: pb.WorkerInfo
    record: pb.WorkerRecord
    healthy: bool = True
    releasing: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return self.record.name

    def suspect(self) -> None:
        """Ask the worker itself at the next refresh whether it is healthy."""
        self.healthy = False


@dataclass
class Membership:
    """All connected workers by name, refreshed every `watch_seconds`, each in a task of its own.

    All serve one model, store pages of one catalog and speak this gateway's protocol: incompatible
    workers are left out. The model of the first connected worker counts.
    """

    registry: Registry
    settings: WireSettings
    catalog: str = ""
    by_name: dict[str, Node] = field(default_factory=dict)
    joined: Joined | None = None
    _fingerprint: str | None = None
    _incompatible: dict[str, str] = field(default_factory=dict)
    _releases: dict[str, dict[str, PendingRelease]] = field(default_factory=dict)
    _looks: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    _failures: dict[str, str] = field(default_factory=dict)
    _outage: Outage = field(
        default_factory=lambda: Outage(_log, "registry unread", "registry read again")
    )
    _closed: bool = False
    _watching: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Look at every worker once, then go on refreshing: one that is absent may join later."""
        try:
            await self._refresh_all()
        except BaseException:
            await self.close()
            raise
        if not self.by_name:
            _log.warning("no worker yet", reason=self.describe_absence())
        self._watching = asyncio.create_task(self._watch(), name="workers")

    def describe_absence(self) -> str:
        """Say why there is no worker: those that were left out or do not answer, or none at all."""
        reasons = (*self._incompatible.values(), *self._failures.values())
        return "; ".join(reasons) or "there is no worker now; its model may still be loading"

    def schedule_release(self, name: str, session: str, request: PendingRelease) -> None:
        """Send a worker the release of a session at the next refresh that reaches it.

        Those that are scheduled for long make room for others: a worker releases idle sessions by
        itself anyway.
        """
        releases = self._releases.setdefault(name, {})
        releases[session] = request
        if len(releases) > _MAX_RELEASES:
            del releases[next(iter(releases))]
        if len(self._releases) > _MAX_RELEASED_WORKERS:
            del self._releases[next(iter(self._releases))]

    def cancel_release(self, name: str, session: str) -> None:
        """Drop the scheduled release: the session is in this worker again."""
        self._releases.get(name, {}).pop(session, None)

    async def exclude(self, node: Node, reason: str) -> None:
        """Disconnect a worker that turned out to be incompatible; it may join again."""
        if self.by_name.get(node.name) is node:
            await self._remove(node, reason)

    async def close(self) -> None:
        """Stop refreshing, and close the connections; the workers themselves run on."""
        # The registry's client may swallow a cancellation: then this ends the watch.
        self._closed = True
        releasing = [node.releasing for node in self.by_name.values()]
        tasks = [each for each in (self._watching, *self._looks.values(), *releasing) if each]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(node.worker.close() for node in self.by_name.values()))
        await self.registry.close()

    async def _watch(self) -> None:
        while not self._closed:
            await asyncio.sleep(self.settings.watch_seconds)
            try:
                await self._begin_refresh()
            except Exception:  # whatever a registry holds, the next refresh comes
                _log.exception("refresh failed")

    async def _refresh_all(self) -> None:
        """Refresh and wait for the end, which is a few times `look_seconds` away."""
        await self._begin_refresh()
        if self._looks:
            await asyncio.wait(self._looks.values())

    async def _begin_refresh(self) -> None:
        """Read the registry, and begin to look at each worker: known ones, and new ones to join.

        A worker that is still being looked at, since it is silent, holds up no other.
        """
        try:
            async with asyncio.timeout(self.settings.look_seconds):
                announced = {record.name: record for record in await self.registry.records()}
        except (RegistryError, TimeoutError) as error:
            self._outage.note(str(error) or "it did not answer in time")
            announced = {node.name: node.record for node in self.by_name.values()}
        else:
            self._outage.end()
        for noted in (self._failures, self._incompatible):
            for name in noted.keys() - announced.keys():
                del noted[name]
        for name, node in self.by_name.items():
            self._begin_look(name, self._refresh_node(node, announced.get(name)))
        for name, record in announced.items():
            if name not in self.by_name:
                self._begin_look(name, self._join(record))

    def _begin_look(self, name: str, look: "Coroutine[Any, Any, None]") -> None:
        if name in self._looks:
            look.close()
            return
        task = asyncio.create_task(_log_failure(look), name=f"look at {name}")
        self._looks[name] = task
        task.add_done_callback(lambda _: self._looks.pop(name))

    async def _refresh_node(self, node: Node, record: pb.WorkerRecord | None) -> None:
        """Update a worker's record. An unhealthy or unregistered worker is asked itself."""
        if record is not None and record.address != node.worker.address:
            await self._remove(node, "it is at another address")
            return
        if record is None or not self.registry.loads or not node.healthy:
            try:
                record = await node.worker.record(node.name, node.info)
            except (WorkerLost, WorkerRefused) as error:
                await self._remove(node, error.message)
                return
        reason = self._find_incompatibility(node.name, record.protocol_version, record.fingerprint)
        if reason is not None:
            await self._remove(node, reason)
            return
        node.record = record
        node.healthy = True
        if self._releases.get(node.name) and (node.releasing is None or node.releasing.done()):
            node.releasing = asyncio.create_task(
                _log_failure(self._send_releases(node)), name=f"releases {node.name}"
            )

    async def _send_releases(self, node: Node) -> None:
        """Send a worker its scheduled releases, until it is lost; the rest waits for a refresh."""
        releases = self._releases.get(node.name, {})
        for session, request in list(releases.items()):
            try:
                await self._send_release(node, request)
            except WorkerLost:
                node.suspect()
                return
            except WorkerRefused as refusal:
                if refusal.code in _RETRIED:
                    continue
                _log.info(
                    "release refused", worker=node.name, session=session, reason=refusal.message
                )
            if releases.get(session) is request:
                del releases[session]

    async def _send_release(self, node: Node, request: PendingRelease) -> None:
        # Slow is not lost, but a worker that is silent must not count as healthy meanwhile.
        slow = asyncio.get_running_loop().call_later(self.settings.look_seconds, node.suspect)
        try:
            if isinstance(request, pb.DeleteRequest):
                await node.worker.delete(request)
            else:
                await node.worker.release(request)
        finally:
            slow.cancel()

    async def _join(self, record: pb.WorkerRecord) -> None:
        """Connect to a worker, unless it is not ready or incompatible."""
        worker = GrpcWorkerClient(self.settings.at(record.address), self.catalog)
        try:
            info = await worker.describe()
            loaded = await worker.record(record.name, info)
        except (WorkerLost, WorkerRefused) as error:
            self._failures[record.name] = error.message
            await worker.close()  # still starting, or gone: the next refresh tries again
            if error.code is ErrorCode.CATALOG_MISMATCH:
                self._leave_out(record.name, f"worker {record.name}: {error.message}")
            return
        if self._is_incompatible(record.name, info):
            await worker.close()
            return
        self._failures.pop(record.name, None)
        self.by_name[record.name] = Node(worker, info, loaded)
        _log.info("worker joined", worker=record.name, address=record.address)
        if self.joined is not None:
            await self.joined(record.name)

    def _is_incompatible(self, name: str, info: pb.WorkerInfo) -> bool:
        """Check a worker; log once why it is left out. The first one sets the model."""
        reason = self._find_incompatibility(name, info.protocol_version, info.fingerprint)
        if reason is None:
            self._fingerprint = info.fingerprint
            self._incompatible.pop(name, None)
            return False
        self._leave_out(name, reason, fingerprint=info.fingerprint)
        return True

    def _leave_out(self, name: str, reason: str, **details: str) -> None:
        """Note why a worker is left out, and log it once."""
        if self._incompatible.get(name) != reason:
            self._incompatible[name] = reason
            _log.warning("worker incompatible", worker=name, reason=reason, **details)

    def _find_incompatibility(self, name: str, version: int, fingerprint: str) -> str | None:
        """Find the reason why a worker cannot serve this gateway; None if it can."""
        if version != PROTOCOL_VERSION:
            older = "worker" if version < PROTOCOL_VERSION else "gateway"
            return (
                f"worker {name} speaks protocol {version}, this gateway {PROTOCOL_VERSION}: "
                f"upgrade the {older}"
            )
        if self._fingerprint is not None and fingerprint != self._fingerprint:
            return f"worker {name} serves another model than the others: stop it or start it anew"
        return None

    async def _remove(self, node: Node, reason: str) -> None:
        """Disconnect a worker and fail its calls; a drained one gets time for its last answers."""
        if self.by_name.pop(node.name, None) is None:
            return  # it was removed meanwhile
        _log.warning("worker left", worker=node.name, reason=reason)
        await node.worker.close(_LAST_ANSWER_SECONDS if node.record.draining else 0.0)


async def _log_failure(work: "Coroutine[Any, Any, None]") -> None:
    try:
        await work
    except Exception:  # the next refresh comes
        _log.exception("refresh failed")
