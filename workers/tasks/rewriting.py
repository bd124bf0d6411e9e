"""What a turn rewrites of the session's log before it appends its own tokens.

A chat template may say earlier answers otherwise once a user's message follows: most drop their
reasoning. The model is trained on that, so the session goes back to the first token that is said
otherwise, and computes what follows again.
"""

from collections.abc import Sequence

import structlog

from kvrecall.domain.rewrites.rewrite import Rewrite, apply_edits
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.snapshots import find_last
from workers.generation.rendering import find_rewrite
from workers.generation.steps import Steps
from workers.model.tokenizer import ChatMessage
from workers.tasks.rewinding import rewind

_log = structlog.get_logger(__name__)


def plan_rewrite(
    engine: Engine,
    session: WorkerSession,
    earlier: pb.Earlier,
    messages: Sequence[ChatMessage],
) -> Steps[Rewrite | None]:
    """Plan what the session's log becomes now that `messages` follow; None where it stays.

    earlier: the log's end, as far as a template may rewrite it.
    """
    if not earlier.messages or not earlier.token_ids or not messages or session.episode.id:
        return None
    edits = yield from find_rewrite(engine, session, earlier, messages)
    if not edits:
        return None
    kept = _find_kept(engine, session, edits[0].start)
    if kept < session.committed_tokens - len(earlier.token_ids):
        _log.warning("reasoning kept", session=session.name, reason="no state before it is stored")
        return None
    return Rewrite(kept, session.committed_rows, edits)


def _find_kept(engine: Engine, session: WorkerSession, position: int) -> int:
    """Find the whole pages before a position that the session can go on behind; returns their rows."""
    page_tokens = engine.store.layout.page_tokens
    most = min(session.committed_rows, position - position % page_tokens)
    if not engine.has_states:
        return most
    return find_last(session.snapshots, most)


def apply_rewrite(
    engine: Engine, resident: ResidentSession, rewrite: Rewrite, earlier: pb.Earlier
) -> Steps[None]:
    """Go back to what is kept, with the rewritten tokens pending. Raises as `rewind`."""
    session = resident.session
    start = session.length + len(session.pending) - len(earlier.token_ids)
    tokens = apply_edits(earlier.token_ids, rewrite.edits, start)
    yield from rewind(engine, resident, rewrite.kept, tokens[rewrite.kept - start :])
    session.dropped_tokens += rewrite.dropped_tokens
    engine.metrics.inc("worker_dropped_tokens_total", rewrite.dropped_tokens)
