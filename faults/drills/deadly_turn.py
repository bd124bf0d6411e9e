"""A worker that ends when a turn has the word DEATH in it."""

import os
from collections.abc import AsyncGenerator

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.rpc.service import WorkerService


def apply() -> None:
    """Replace the worker's turns."""
    turn = WorkerService.turn

    async def deadly(
        self: WorkerService, request: pb.TurnRequest
    ) -> AsyncGenerator[pb.TurnEvent, None]:
        if any("DEATH" in message.content for message in request.messages):
            os._exit(139)
        async for event in turn(self, request):
            yield event

    WorkerService.turn = deadly  # type: ignore[method-assign]
