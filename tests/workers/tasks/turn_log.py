"""Finished turns as the turn log has them, and rebuilds from them."""

from collections.abc import Sequence
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.conftest import build_spec

PAGE_TOKENS = 64


def logged(done: pb.TurnDone, text: str) -> pb.LoggedTurn:
    """A finished turn of one user message."""
    messages = [pb.Message(role="user", content=text)]
    if done.HasField("message"):
        messages.append(done.message)
    return pb.LoggedTurn(
        token_ids=done.token_ids,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        messages=messages,
        deferred_tokens=done.deferred_tokens,
        recorded_tokens=done.recorded_tokens,
        unsettled_tokens=done.state.unsettled,
        remembered_tokens=done.remembered.tokens,
        remembered_behind=done.remembered.behind,
        shared_tokens=done.shared_pages * PAGE_TOKENS,
        rewrite=done.rewrite if done.HasField("rewrite") else None,
    )


def rebuild(
    worker: Any, state: pb.SessionState, turns: Sequence[pb.LoggedTurn], **spec: Any
) -> pb.RebuildResult:
    """Rebuild session `s` from its log."""
    request = pb.RebuildRequest(spec=build_spec("s", **spec), state=state, turns=turns)
    return worker.scheduler.rebuild(request).result(600)
