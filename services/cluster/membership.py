"""The workers that a gateway is connected to: joins, failures and pending releases."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import RegistryError, ServiceError, WorkerLost, WorkerRefused
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.registry import Registry
from services.cluster.settings import WireSettings

_log = structlog.get_logger("kvrecall.cluster")
_LAST_ANSWER_SECONDS = 1.0
# Codes of refusals after which a release is sent again at the next refresh.
_RETRIED = frozenset({ErrorCode.STORAGE_FAILED, ErrorCode.CANCELLED, ErrorCode.OVERLOADED})
Joined = Callable[[], Awaitable[None]]
PendingRelease = pb.DeleteRequest | pb.ReleaseRequest
"""A session that a worker is to free: it is deleted, or moved to another worker."""


@dataclass
class Node:
    """A connected worker. `healthy`: no call to it was lost since its last refresh."""

    worker: GrpcWorkerClient
    info: pb.WorkerInfo
    record: pb.WorkerRecord
    healthy: bool = True

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return self.record.name


@dataclass
class Membership:
    """All connected workers by name, refreshed every `watch_seconds`.

    All serve one model and speak this gateway's protocol: incompatible workers are left out. The
    model of the first connected worker counts.
    """

    registry: Registry
    settings: WireSettings
    by_name: dict[str, Node] = field(default_factory=dict)
    joined: Joined | None = None
    _fingerprint: str | None = None
    _incompatible: dict[str, str] = field(default_factory=dict)
    _releases: dict[str, dict[str, PendingRelease]] = field(default_factory=dict)
    _tried: tuple[str, ...] = ()
    _failures: dict[str, str] = field(default_factory=dict)
    _needs_sync: bool = False
    _closed: bool = False
    _watching: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Connect to one worker and start refreshing. Raises WorkerLost after `connect_seconds`."""
        try:
            async with asyncio.timeout(self.settings.connect_seconds):
                await self._refresh()
                while not self.by_name:
                    await asyncio.sleep(self.settings.watch_seconds)
                    await self._refresh()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise WorkerLost(self._describe_failure()) from error
            raise
        self._needs_sync = False  # the caller of `start` syncs the workers itself
        self._watching = asyncio.create_task(self._watch(), name="workers")

    def _describe_failure(self) -> str:
        if self._incompatible:
            return "; ".join(self._incompatible.values())
        reasons = "; ".join(self._failures.values()) or ", ".join(self._tried)
        seconds = f"{self.settings.connect_seconds:g} seconds"
        return f"no worker was reached within {seconds} ({reasons or 'none was announced'})"

    def schedule_release(self, name: str, session: str, request: PendingRelease) -> None:
        """Send a worker the release of a session at the next refresh that reaches it."""
        self._releases.setdefault(name, {})[session] = request

    def cancel_release(self, name: str, session: str) -> None:
        """Drop the scheduled release: the session is in this worker again."""
        self._releases.get(name, {}).pop(session, None)

    async def close(self) -> None:
        """Stop refreshing, and close the connections; the workers themselves run on."""
        # The registry's client may swallow a cancellation: then this ends the watch.
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.gather(*(node.worker.close() for node in self.by_name.values()))
        await self.registry.close()

    async def _watch(self) -> None:
        while not self._closed:
            await asyncio.sleep(self.settings.watch_seconds)
            try:
                await self._refresh()
                if self._needs_sync and self.joined is not None:
                    await self.joined()
                    self._needs_sync = False
            except ServiceError as error:
                _log.warning("refresh incomplete", reason=error.message)
            except Exception:  # whatever a registry holds, the next refresh comes
                _log.exception("refresh failed")

    async def _refresh(self) -> None:
        """Read the registry, connect to new workers, and refresh the records of the others."""
        try:
            announced = {record.name: record for record in await self.registry.records()}
        except RegistryError as error:
            _log.warning("registry unread", reason=error.message)
            announced = {node.name: node.record for node in self.by_name.values()}
        self._tried = tuple(record.address for record in announced.values())
        known = [
            self._refresh_node(node, announced.get(name)) for name, node in self.by_name.items()
        ]
        new = [self._join(record) for name, record in announced.items() if name not in self.by_name]
        await asyncio.gather(*known, *new)

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
        with suppress(WorkerLost):  # the next refresh tries again
            await self._send_releases(node)

    async def _send_releases(self, node: Node) -> None:
        """Send a worker its scheduled releases."""
        releases = self._releases.get(node.name, {})
        for session, request in list(releases.items()):
            try:
                if isinstance(request, pb.DeleteRequest):
                    await node.worker.delete(request)
                else:
                    await node.worker.release(request)
            except WorkerRefused as refusal:
                if refusal.code in _RETRIED:
                    continue
                _log.info(
                    "release refused", worker=node.name, session=session, reason=refusal.message
                )
            if releases.get(session) is request:
                del releases[session]

    async def _join(self, record: pb.WorkerRecord) -> None:
        """Connect to a worker, unless it is not ready or incompatible."""
        worker = GrpcWorkerClient(self.settings.at(record.address))
        try:
            info = await worker.describe()
            loaded = await worker.record(record.name, info)
        except (WorkerLost, WorkerRefused) as error:
            self._failures[record.name] = error.message
            await worker.close()  # still starting, or gone: the next refresh tries again
            return
        if self._is_incompatible(record.name, info):
            await worker.close()
            return
        self._failures.pop(record.name, None)
        self.by_name[record.name] = Node(worker, info, loaded)
        self._needs_sync = True
        _log.info("worker joined", worker=record.name, address=record.address)

    def _is_incompatible(self, name: str, info: pb.WorkerInfo) -> bool:
        """Check a worker; log once why it is left out. The first one sets the model."""
        reason = self._find_incompatibility(name, info.protocol_version, info.fingerprint)
        if reason is None:
            self._fingerprint = info.fingerprint
            self._incompatible.pop(name, None)
            return False
        if self._incompatible.get(name) != reason:
            self._incompatible[name] = reason
            _log.warning(
                "worker incompatible", worker=name, fingerprint=info.fingerprint, reason=reason
            )
        return True

    def _find_incompatibility(self, name: str, version: int, fingerprint: str) -> str | None:
        """Find the reason why a worker cannot serve this gateway; None if it can.

        `version` 0 is a worker from before the protocol had versions: it speaks version 1.
        """
        version = version or 1
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
        del self.by_name[node.name]
        _log.warning("worker left", worker=node.name, reason=reason)
        await node.worker.close(_LAST_ANSWER_SECONDS if node.record.draining else 0.0)
