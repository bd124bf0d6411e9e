"""Simulated workers: real gRPC servers and registrations, with scripted rows instead of a model.

`python -m benchmarks.scale.workers --count 50` prints a line of JSON with the addresses once all of
them listen, and serves until its input ends.
"""

import argparse
import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import structlog
from google.protobuf.empty_pb2 import Empty

from kvrecall.domain.errors import WorkerRefused
from kvrecall.protocol import PROTOCOL_VERSION, calls
from kvrecall.protocol.calls import Call
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.redis import redis_client
from kvrecall_server.testing import StubWorker
from workers.errors import WorkerError
from workers.metrics.catalogue import create_metrics
from workers.rpc.registration import Registration
from workers.rpc.server import WorkerServer
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

ROOT = Path(__file__).parents[2]
# Calls whose client method takes something else than the request itself.
_UNLIKE: dict[str, Callable[[StubWorker, Any], Awaitable[Any]]] = {
    calls.DESCRIBE.name: lambda worker, _: _describe(worker),
    calls.MEMORY.name: lambda worker, request: worker.memory(request.session),
    calls.EMBED.name: lambda worker, request: worker.embed(list(request.texts)),
    calls.STATS.name: lambda worker, _: _first_stats(worker),
}


class _Refused(WorkerError):
    """A refusal of the stub, as a worker raises it."""

    def __init__(self, refusal: WorkerRefused) -> None:
        super().__init__(refusal.message)
        self.code = refusal.code


class ScriptedService:
    """Answers the table's calls with a `StubWorker`.

    Every committed state is `state_bytes` larger than the stub's, as large as a real selection.
    """

    def __init__(self, state_bytes: int) -> None:
        self._worker = StubWorker()
        self._padding = bytes(state_bytes)
        self.metrics = create_metrics("scripted")

    def handler(self, call: Call[Any, Any]) -> Callable[[Any], Awaitable[Any]]:
        """The answer to a unary call."""

        async def answer(request: Any) -> Any:
            self._worker.call_log.clear()
            try:
                if call.name in _UNLIKE:
                    return await _UNLIKE[call.name](self._worker, request)
                result = await getattr(self._worker, call.method)(request)
            except WorkerRefused as refusal:
                raise _Refused(refusal) from refusal
            if call is calls.FORK:
                result.state.selection += self._padding
            return Empty() if result is None else result

        return answer

    def stream_handler(self, call: Call[Any, Any]) -> Callable[[Any], AsyncGenerator[Any, None]]:
        """The answer to a streaming call."""
        handlers: dict[str, Callable[[Any], AsyncGenerator[Any, None]]] = {
            calls.TURN.name: self._turn,
            calls.REPAIR.name: self._repair,
            calls.LIST_PAGES.name: self._list,
        }
        return handlers[call.name]

    def _list(self, request: pb.ListPagesRequest) -> AsyncGenerator[pb.PageList, None]:
        return self._worker.list_pages("", request)

    async def _turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        try:
            async for event in self._worker.turn(request):
                if event.HasField("done"):
                    event.done.state.selection += self._padding
                yield event
        except WorkerRefused as refusal:
            raise _Refused(refusal) from refusal

    async def _repair(self, request: pb.RepairRequest) -> AsyncGenerator[pb.RepairEvent, None]:
        yield pb.RepairEvent(accepted=True)
        yield pb.RepairEvent(result=await self._worker.repair(request))


async def _describe(worker: StubWorker) -> pb.WorkerInfo:
    info = await worker.describe()
    info.protocol_version = PROTOCOL_VERSION
    return info


async def _first_stats(worker: StubWorker) -> pb.WorkerStats:
    stats = next(iter((await worker.stats()).values()))
    stats.slots_in_use = 0  # the stub has a slot for every session
    return stats


async def _serve(count: int, url: str | None, namespace: str, state_bytes: int) -> None:
    # All are kept: a server without a reference stops.
    servers = [WorkerServer(ServerSettings(listen="127.0.0.1:0")) for _ in range(count)]
    for server in servers:
        await server.start(cast("WorkerService", ScriptedService(state_bytes)))
        if url is not None:
            await _register(url, namespace, server.address)
    print(json.dumps([server.address for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _register(url: str, namespace: str, address: str) -> None:
    info = await StubWorker().describe()

    def record(draining: bool) -> pb.WorkerRecord:
        return pb.WorkerRecord(
            name=address,
            address=address,
            model=info.model,
            fingerprint=info.fingerprint,
            slots=4,
            free_slots=4,
            draining=draining,
            protocol_version=PROTOCOL_VERSION,
        )

    await Registration(redis_client(url), namespace, address, record).start()


@contextmanager
def simulated_workers(
    count: int, url: str | None, namespace: str, state_bytes: int
) -> Iterator[Sequence[str]]:
    """Addresses of workers in a process of their own, registered in the Redis at `url`, if any."""
    command = [sys.executable, "-m", "benchmarks.scale.workers", "--count", str(count)]
    command += ["--namespace", namespace, "--state-bytes", str(state_bytes)]
    command += ["--url", url] if url else []
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--url")
    parser.add_argument("--namespace", default="scale")
    parser.add_argument("--state-bytes", type=int, default=16384)
    options = parser.parse_args()
    # The parent process reads the addresses alone: a log would block once the pipe is full.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_serve(options.count, options.url, options.namespace, options.state_bytes))


if __name__ == "__main__":
    _main()
