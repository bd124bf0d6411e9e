"""What sessions of one tenant say first in the same words: its rows are kept once, and shared.

A session's rows follow from its model, its settings and its tokens. A digest stands for all of these but the tokens
behind the leading system messages; those the worker compares itself, and takes whole pages as far as they are equal.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import takewhile

from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session, SharedPages
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.base import Catalog
from services.catalog.records import KnownPrefix, TurnCommit
from services.cluster.worker_client import Worker

MOST_PREFIX_TOKENS = 1 << 15
"""Of a session's first turn, that others may share: what system messages and tools can sensibly take."""
SEEDED_METHODS = frozenset({"random"})
"""Methods whose evictions follow from the session's seed: the seed shapes rows as well."""


@dataclass(frozen=True)
class FirstTurn:
    """A session's first turn, as it is looked at by others: its digest, and what is known to begin alike.

    `known` is counted as shared already; None: there is none, and others may share what this turn says.
    """

    digest: str
    known: KnownPrefix | None
    page_tokens: int

    @property
    def offered(self) -> wire.Prefix | None:
        """What the worker may take."""
        return (
            None
            if self.known is None
            else wire.Prefix(owner=self.known.owner, token_ids=self.known.token_ids)
        )

    def completed(self, commit: TurnCommit, done: wire.TurnDone) -> TurnCommit:
        """The turn's commit with what it shares, and what others may share of it."""
        prefix = self._prefix(commit.turn.session, done)
        return replace(commit, shared=self._shared(done), prefix=prefix, digest=self.digest)

    def _shared(self, done: wire.TurnDone) -> tuple[SharedPages, ...]:
        """What the session shares since the turn; nothing gives back what was counted before."""
        if self.known is None or not done.shared_pages:
            return ()
        return (SharedPages(self.known.owner, done.shared_pages),)

    def _prefix(self, session: str, done: wire.TurnDone) -> KnownPrefix | None:
        """What others may share of this turn: the whole pages of its prompt."""
        if self.known is not None:
            return None
        prompt = done.token_ids[: min(done.prompt_tokens, MOST_PREFIX_TOKENS)]
        whole = len(prompt) // self.page_tokens * self.page_tokens
        return KnownPrefix(session, tuple(prompt[:whole])) if whole else None


class PrefixSharing:
    """Finds, for a session's first turn, a session that began alike."""

    def __init__(self, catalog: Catalog, worker: Worker) -> None:
        self._catalog = catalog
        self._worker = worker
        self._info: WorkerInfo | None = None

    async def first_turn(self, session: Session, messages: Sequence[Message]) -> FirstTurn | None:
        """How the turn may share; None for a later turn, and without system messages and tools before its words.

        What is found is counted as shared before it is used, so that its owner's deletion leaves it.
        """
        leading = tuple(takewhile(lambda message: message.role == "system", messages))
        if session.turns or not (leading or session.settings.tools):
            return None
        info = await self._described()
        digest = digest_of(session, leading, info)
        known = await self._catalog.page_refs.get_prefix(digest)
        if known is not None:
            pages = SharedPages(known.owner, len(known.token_ids) // info.page_tokens)
            if not await self._catalog.page_refs.reserve(session.id, pages):
                known = None
        return FirstTurn(digest, known, info.page_tokens)

    async def _described(self) -> WorkerInfo:
        if self._info is None:
            self._info = worker_info_from_wire(await self._worker.describe())
        return self._info


def digest_of(session: Session, leading: Sequence[Message], info: WorkerInfo) -> str:
    """What the rows of a session's leading system messages follow from, its tenant included, in 64 hex digits."""
    settings = session.settings
    shapes = {
        "tenant": settings.tenant,
        "model": info.fingerprint,
        "block_tokens": info.block_tokens,
        "page_tokens": info.page_tokens,
        "budget": settings.budget,
        "repair_rows": settings.repair_rows,
        "method": settings.method,
        "method_settings": settings.method_settings,
        "layer_budgets": settings.layer_budgets,
        "repair_settings": settings.repair_settings,
        "repair_scan": settings.repair_scan,
        "seed": settings.seed if settings.method in SEEDED_METHODS else None,
        "tools": settings.tools,
        "leading": [asdict(message) for message in leading],
    }
    text = json.dumps(shapes, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), key=settings.tenant.encode(), digest_size=32).hexdigest()
