"""The worker's calls, written once: names, messages, time limits and routing.

Clients, servicer and pool are driven by this table. A new call is a line here, an rpc in
worker.proto, a method of `services.cluster.worker_client` and a method of
`workers.rpc.service.WorkerService`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from kvrecall.protocol.v1 import worker_pb2 as wire

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
Timeout = Literal[
    "connect_seconds",
    "look_seconds",
    "quick_seconds",
    "open_seconds",
    "embed_seconds",
    "repair_seconds",
    "rebuild_seconds",
    "turn_seconds",
    "build_seconds",
]

SERVICE = wire.DESCRIPTOR.services_by_name["Worker"].full_name


@dataclass(frozen=True)
class Call(Generic[RequestT, ResponseT]):
    """One call of `service Worker`.

    - `name`: of the rpc in worker.proto.
    - `timeout`: the setting of `services.cluster.settings.WireSettings` that limits it.
    - `session`: the session whose worker answers; None for the other calls.
    - `any_worker`: any worker can answer. The pool has a method of its own for calls that are bound
      neither to an open session nor to any worker.
    - `drained`: a worker's drain waits for the call and refuses new ones.
    - `uncancellable`: a client waits for the end even if its caller is cancelled: a request on its
      way could otherwise arrive after the session's next turn.
    - `follows`: a streaming call. This call is sent once the worker has answered with the first
      event of each such call of the same session, since calls may overtake each other.
    - `streaming`: the answer is a stream of `response`. Closing it early cancels the call.
    """

    name: str
    request: type[RequestT]
    response: type[ResponseT]
    timeout: Timeout
    session: Callable[[RequestT], str] | None = None
    any_worker: bool = False
    drained: bool = False
    uncancellable: bool = False
    follows: "Call[Any, Any] | None" = None
    streaming: bool = False

    @property
    def method(self) -> str:
        """The Python name: of methods of `WorkerService` and of the clients."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


DESCRIBE = Call("Describe", Empty, wire.WorkerInfo, "connect_seconds")
RETAIN_ONLY = Call("RetainOnly", wire.RetainOnlyRequest, Empty, "open_seconds")
OPEN = Call(
    "Open",
    wire.OpenRequest,
    wire.MemoryReport,
    "open_seconds",
    drained=True,
    uncancellable=True,
)
FORK = Call(
    "Fork",
    wire.ForkRequest,
    wire.ForkResult,
    "rebuild_seconds",
    drained=True,
    uncancellable=True,
)
REBUILD = Call(
    "Rebuild",
    wire.RebuildRequest,
    wire.RebuildResult,
    "rebuild_seconds",
    drained=True,
)
RELEASE = Call("Release", wire.ReleaseRequest, Empty, "open_seconds")
TURN = Call(
    "Turn",
    wire.TurnRequest,
    wire.TurnEvent,
    "turn_seconds",
    session=lambda request: request.session,
    drained=True,
    streaming=True,
)
REPAIR = Call(
    "Repair",
    wire.RepairRequest,
    wire.RepairEvent,
    "repair_seconds",
    session=lambda request: request.session,
    drained=True,
    streaming=True,
)
STOP_EARLY = Call(
    "StopEarly",
    wire.StopEarlyRequest,
    Empty,
    "quick_seconds",
    session=lambda request: request.session,
    follows=REPAIR,
)
DETOKENIZE = Call(
    "Detokenize",
    wire.DetokenizeRequest,
    wire.DetokenizeResult,
    "quick_seconds",
    any_worker=True,
)
EMBED = Call("Embed", wire.EmbedRequest, wire.EmbedResult, "embed_seconds", any_worker=True)
BUILD_EPISODES = Call(
    "BuildEpisodes",
    wire.BuildEpisodesRequest,
    wire.BuildEpisodesResult,
    "build_seconds",
    session=lambda request: request.session,
    drained=True,
)
MEMORY = Call(
    "Memory",
    wire.MemoryRequest,
    wire.MemoryReport,
    "quick_seconds",
    session=lambda request: request.session,
)
DELETE = Call("Delete", wire.DeleteRequest, Empty, "open_seconds")
STATS = Call("Stats", Empty, wire.WorkerStats, "look_seconds")

CALLS: tuple[Call[Any, Any], ...] = (
    DESCRIBE,
    RETAIN_ONLY,
    OPEN,
    FORK,
    REBUILD,
    RELEASE,
    TURN,
    REPAIR,
    STOP_EARLY,
    DETOKENIZE,
    EMBED,
    BUILD_EPISODES,
    MEMORY,
    DELETE,
    STATS,
)
"""All calls, in the order of worker.proto."""
