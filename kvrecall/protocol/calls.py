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

from kvrecall.protocol.v1 import worker_pb2 as pb

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
Timeout = Literal[
    "look_seconds",
    "quick_seconds",
    "open_seconds",
    "embed_seconds",
    "repair_seconds",
    "rebuild_seconds",
    "turn_seconds",
    "build_seconds",
]

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name


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


DESCRIBE = Call("Describe", pb.DescribeRequest, pb.WorkerInfo, "look_seconds")
LIST_PAGES = Call("ListPages", pb.ListPagesRequest, pb.PageList, "rebuild_seconds", streaming=True)
DELETE_PAGES = Call("DeletePages", pb.DeletePagesRequest, pb.DeletePagesResult, "open_seconds")
OPEN = Call(
    "Open",
    pb.OpenRequest,
    pb.MemoryReport,
    "open_seconds",
    drained=True,
    uncancellable=True,
)
FORK = Call(
    "Fork",
    pb.ForkRequest,
    pb.ForkResult,
    "rebuild_seconds",
    drained=True,
    uncancellable=True,
)
REBUILD = Call(
    "Rebuild",
    pb.RebuildRequest,
    pb.RebuildResult,
    "rebuild_seconds",
    drained=True,
)
RELEASE = Call("Release", pb.ReleaseRequest, Empty, "open_seconds")
TURN = Call(
    "Turn",
    pb.TurnRequest,
    pb.TurnEvent,
    "turn_seconds",
    session=lambda request: request.session,
    drained=True,
    streaming=True,
)
REPAIR = Call(
    "Repair",
    pb.RepairRequest,
    pb.RepairEvent,
    "repair_seconds",
    session=lambda request: request.session,
    drained=True,
    streaming=True,
)
SETTLE = Call(
    "Settle",
    pb.SettleRequest,
    pb.SettleResult,
    "repair_seconds",
    session=lambda request: request.session,
    drained=True,
    uncancellable=True,
)
PREFILL_AHEAD = Call(
    "PrefillAhead",
    pb.PrefillAheadRequest,
    pb.PrefillAheadResult,
    "repair_seconds",
    session=lambda request: request.session,
    drained=True,
    uncancellable=True,
)
TAKE_USAGE = Call(
    "TakeUsage",
    pb.TakeUsageRequest,
    pb.Usage,
    "repair_seconds",
    session=lambda request: request.session,
)
STOP_EARLY = Call(
    "StopEarly",
    pb.StopEarlyRequest,
    Empty,
    "quick_seconds",
    session=lambda request: request.session,
    follows=REPAIR,
)
DETOKENIZE = Call(
    "Detokenize",
    pb.DetokenizeRequest,
    pb.DetokenizeResult,
    "quick_seconds",
    any_worker=True,
)
TOKENIZE = Call(
    "Tokenize",
    pb.TokenizeRequest,
    pb.TokenizeResult,
    "open_seconds",
    any_worker=True,
)
MAP_ROWS = Call(
    "MapRows",
    pb.MapRowsRequest,
    pb.MapRowsResult,
    "quick_seconds",
    any_worker=True,
)
EMBED = Call("Embed", pb.EmbedRequest, pb.EmbedResult, "embed_seconds", any_worker=True)
BUILD_EPISODES = Call(
    "BuildEpisodes",
    pb.BuildEpisodesRequest,
    pb.BuildEpisodesResult,
    "build_seconds",
    session=lambda request: request.session,
    drained=True,
)
MEMORY = Call(
    "Memory",
    pb.MemoryRequest,
    pb.MemoryReport,
    "quick_seconds",
    session=lambda request: request.session,
)
DELETE = Call("Delete", pb.DeleteRequest, Empty, "open_seconds")
STATS = Call("Stats", Empty, pb.WorkerStats, "look_seconds")

CALLS: tuple[Call[Any, Any], ...] = (
    DESCRIBE,
    LIST_PAGES,
    DELETE_PAGES,
    OPEN,
    FORK,
    REBUILD,
    RELEASE,
    TURN,
    REPAIR,
    SETTLE,
    PREFILL_AHEAD,
    TAKE_USAGE,
    STOP_EARLY,
    DETOKENIZE,
    TOKENIZE,
    MAP_ROWS,
    EMBED,
    BUILD_EPISODES,
    MEMORY,
    DELETE,
    STATS,
)
"""All calls, in the order of worker.proto."""
