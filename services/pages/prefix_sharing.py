"""Prefix sharing: sessions of one tenant that begin with the same tokens share the pages of these.

A session's rows follow from its model, its settings and its tokens. A digest stands for all of
these but the tokens after the leading system messages; the worker compares those itself, and takes
whole pages as far as they are equal.

Workers that cannot read each other's pages, as those without Redis, have a prefix each: a worker that
could not take any offered one offers its own, which its sessions find first.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

from kvrecall.domain.commit_points import CommitPoint
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session, SharedPages
from kvrecall.domain.session_settings import SessionSettings
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import KnownPrefix, TurnCommit
from services.cluster.prompt_family import leading_messages
from services.context import ServiceContext

# Tokens of a first turn that others may share: more than system messages and tools sensibly take.
MAX_PREFIX_TOKENS = 1 << 15
# Methods whose evictions depend on the session's seed: rows depend on it as well.
SEEDED_METHODS = frozenset({"random"})


@dataclass(frozen=True)
class FirstTurn:
    """A session's first turn: the prefix that is known, and the digest to offer its own under.

    `known` already holds a page reference; None: no prefix is known, and others may share this
    turn's. `digest`: empty if the worker has offered a prefix already.
    """

    digest: str
    known: KnownPrefix | None
    page_tokens: int

    @property
    def offered(self) -> pb.Prefix | None:
        """The prefix that the worker may take."""
        return (
            None
            if self.known is None
            else pb.Prefix(
                owner=self.known.owner, token_ids=self.known.token_ids, epoch=self.known.epoch
            )
        )

    def complete(self, commit: TurnCommit, done: pb.TurnDone, epoch: int) -> TurnCommit:
        """Add the shared pages, and the prefix that others may share, to a commit under `epoch`."""
        prefix = self._prefix(commit.turn.session, done, epoch)
        return replace(commit, shared=self._shared(done), prefix=prefix, digest=self.digest)

    def _shared(self, done: pb.TurnDone) -> tuple[SharedPages, ...]:
        """The pages that the session shares since the turn.

        Empty keeps the reference that was reserved.
        """
        if self.known is None or not done.shared_pages:
            return ()
        committed = CommitPoint(self.known.epoch, done.shared_pages * self.page_tokens)
        return (SharedPages(self.known.owner, done.shared_pages, (committed,)),)

    def _prefix(self, session: str, done: pb.TurnDone, epoch: int) -> KnownPrefix | None:
        """The prefix that others may share: the whole pages of this turn's prompt."""
        if not self.digest or done.shared_pages:
            return None
        prompt = done.token_ids[: min(done.prompt_tokens, MAX_PREFIX_TOKENS)]
        whole = len(prompt) // self.page_tokens * self.page_tokens
        return KnownPrefix(session, tuple(prompt[:whole]), epoch) if whole else None


class PrefixSharing:
    """Finds, for a session's first turn, a session with the same prefix."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._info: WorkerInfo | None = None

    async def first_turn(
        self, session: Session, messages: Sequence[Message], worker: str
    ) -> FirstTurn | None:
        """Find a prefix for the turn: one that the worker has written, else any.

        None for a later turn, and without leading system messages or tools.

        Its pages are referenced before they are used, so that the deletion of their owner keeps
        them.
        """
        leading = leading_messages(messages)
        if session.turns or not (leading or session.settings.tools):
            return None
        info = await self._described()
        shared = prefix_digest(session, leading, info)
        own = _digest_for_worker(shared, worker)
        refs = self._catalog.page_refs
        digest = ""
        known = await refs.get_prefix(own)
        if known is None:
            known = await refs.get_prefix(shared)
            digest = shared if known is None else own
        if known is not None:
            pages = SharedPages(known.owner, len(known.token_ids) // info.page_tokens)
            if not await refs.reserve(session.id, pages):
                known, digest = None, shared
        return FirstTurn(digest, known, info.page_tokens)

    async def _described(self) -> WorkerInfo:
        if self._info is None:
            self._info = worker_info_from_wire(await self._worker.describe())
        return self._info


def prefix_digest(session: Session, leading: Sequence[Message], info: WorkerInfo) -> str:
    """Digest everything that the rows of the leading system messages depend on, as 64 hex digits."""
    settings = session.settings
    shapes = {
        "tenant": settings.tenant,
        "model": info.fingerprint,
        "block_tokens": info.block_tokens,
        "page_tokens": info.page_tokens,
        "tools": settings.tools,
        "leading": [asdict(message) for message in leading],
        "selection": None if _rows_follow_from_tokens(settings, info) else _selection(settings),
    }
    text = json.dumps(shapes, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), key=settings.tenant.encode(), digest_size=32).hexdigest()


def _digest_for_worker(digest: str, worker: str) -> str:
    """Digest a prefix that one worker alone has, as 64 hex digits."""
    return blake2b(f"{digest} {worker}".encode(), digest_size=32).hexdigest()


def _rows_follow_from_tokens(settings: SessionSettings, info: WorkerInfo) -> bool:
    """Check if a prompt's rows are those of a full cache, whatever the session selects.

    Blocks attend to every stored row, and the worker knows by position alone what stays active. The
    last bits depend on whether all rows were active, and so on the budget.
    """
    method = next((each for each in info.methods if each.name == settings.method), None)
    if method is None or not method.by_position:
        return False
    chosen = settings.attends_stored
    return method.attends_stored if chosen is None else chosen


def _selection(settings: SessionSettings) -> dict[str, Any]:
    """Settings that say which rows are active, and so what later ones attend to."""
    seeded = settings.method in SEEDED_METHODS or settings.prefills_sparsely
    return {
        "budget": settings.budget,
        "repair_rows": settings.repair_rows,
        "method": settings.method,
        "method_settings": dict(settings.method_settings),
        "layer_budgets": settings.layer_budgets,
        "repair_settings": settings.repair_settings and asdict(settings.repair_settings),
        "prefill": settings.prefill and asdict(settings.prefill),
        "retrieve": settings.retrieve and asdict(settings.retrieve),
        "seed": settings.seed if seeded else None,
    }
