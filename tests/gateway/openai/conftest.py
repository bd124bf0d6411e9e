"""An answer with reasoning and log-probabilities, which the stub worker gives none of by itself."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

REASONED = (
    pb.TokenChunk(ids=[1], reasoning="so "),
    pb.TokenChunk(ids=[2], reasoning="it is"),
    pb.TokenChunk(
        ids=[3],
        text="ok",
        logprobs=[
            pb.TokenLogprob(
                token="ok",
                utf8=b"ok",
                logprob=-0.5,
                top=[pb.TokenLogprob(token="\ufffd", utf8=b"\xf0", logprob=-0.25)],
            )
        ],
    ),
)


@pytest.fixture
def reasoned(api: Any) -> list[dict[str, Any]]:
    """Let the worker's answers be "ok" after "so it is"; the log-probabilities of the former."""
    worker_turn = api.worker.turn

    async def turn(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        async for event in worker_turn(request):
            if not event.HasField("done"):
                continue
            for chunk in REASONED:
                yield pb.TurnEvent(token=chunk)
            event.done.message.reasoning = "so it is"
            event.done.reasoning_tokens = 2
            yield event

    api.worker.turn = turn
    top = [{"token": "\ufffd", "logprob": -0.25, "bytes": [240]}]
    return [{"token": "ok", "logprob": -0.5, "bytes": [111, 107], "top_logprobs": top}]
