"""One session in a worker: fixed configuration, progress, and its place in the active cache."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvrecall.domain.episodes import NO_EPISODE, ActiveEpisode
from kvrecall.domain.fairness.share import Share
from kvrecall.domain.page_ids import PageId
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import LayerBudgets, WorkerOptions
from workers.cache.active_cache import ActiveCache, SlotRows
from workers.engine.ahead import Ahead
from workers.engine.capability import Capability
from workers.engine.eviction_scores import EvictionScores
from workers.engine.selection import Selection
from workers.engine.snapshots import Snapshot
from workers.errors import UnknownSession
from workers.methods import Method, RepairKV
from workers.model.tokenizer import ChatMessage
from workers.primitives.observation import Observed, RecentQueries
from workers.retrieval.host_copy import HostCopy
from workers.retrieval.retriever import Retriever

# Objects of a session, its configuration and its entries in tables.
_SESSION_BYTES = 4096


@dataclass(frozen=True)
class SessionConfig:
    """Settings that are fixed when a session is opened.

    `budget` and `repair_rows` are rows per KV head, averaged over the layers. An `automatic` budget
    is that of the session's present length (`Engine.fit_budget`). `layer_rows` are the
    rows per head that an eviction keeps in each layer, and `split` is how the budget was split into
    them. `retrieved` are the rows per head of the budget that a step retrieves, in every layer: none
    while the session fits its budget. `tools` are OpenAI tool objects. `share`: of the scheduler's
    steps. `row_key` names its pages, and `page_key` encrypts them where they last.
    """

    name: str
    epoch: int
    budget: int
    repair_rows: int
    method: Method
    layer_rows: tuple[int, ...]
    automatic: bool = False
    split: LayerBudgets = "uniform"
    seed: int = 0
    tools: tuple[Any, ...] = ()
    share: Share = field(default_factory=Share)
    repair: RepairKV = field(default_factory=RepairKV)
    prefill: Prefill = field(default_factory=Prefill)
    retrieval: Retrieval | None = None
    retrieved: int = 0
    options: WorkerOptions = field(default_factory=WorkerOptions)
    row_key: bytes = b""
    page_key: bytes = field(default=b"", repr=False)

    @property
    def recalls(self) -> bool:
        """True if rows and selection follow from the tokens alone, as in a full cache.

        Blocks attend to every stored row, and what stays active is a matter of position.
        """
        return (
            self.prefill.attend == "stored"
            and self.method.first_kept(rows=1) is not None
            and self.reselection is None
        )

    @property
    def follows_length(self) -> bool:
        """True if budget or retrieved rows are those of a session of the present length."""
        return self.automatic or (self.retrieval is not None and self.split == "uniform")

    @property
    def reserve(self) -> int:
        """Rows per head that are kept free for a repair: none for a repair that swaps rows."""
        return 0 if self.repair.swap else self.repair_rows

    @property
    def reselection(self) -> Reselection | None:
        """When answers select the rows anew: as the session says, else as its method does."""
        return self.options.reselect or self.method.reselection

    @property
    def kept_queries(self) -> int:
        """Newest tokens whose queries are kept, for evictions and for re-selections."""
        window = self.method.observation.window
        return window if self.reselection is None else max(window, self.reselection.window)


@dataclass(frozen=True)
class Distribution:
    """Next-token log-probabilities on recorded text: token ids `[t]`, float32 `[t, vocabulary]`."""

    token_ids: tuple[int, ...]
    log_probs: Tensor


@dataclass(eq=False)
class WorkerSession:
    """A session that is open in this worker. Only the scheduler's thread touches it.

    The rows of a resident session are in `slot`. A session that is swapped out has no slot:
    `selection` then names its active rows, and `prefetched` is the read of these rows if it has
    begun; in the middle of a job they are `preempted`, in host memory. Functions that need a slot
    take a `ResidentSession`.

    - `page_ids`: of its pages, in order (`kvrecall.domain.page_ids`).
    - `unnamed`: token ids of the rows behind them, in a turn, as far as these are to be stored.
    - `pending`: token ids behind the rows; between turns less than a page, once they are settled.
    - `unsettled`: the first so many of them, whose rows a turn has computed and dropped
      (`workers.generation.settling`).
    - `again`: the positions of these tokens while they are computed once more.
    - `ahead`: of its next prompt, what is computed before the turn (`workers.tasks.ahead`).
    - `remembered`: number of rows of other sessions that it has, in a turn.
    - `inexact_from`: the first row of the turn that was computed over other rows than all before it;
      None before there is one.
    - `recent`: messages that the next rendering of the chat template builds on.
    - `deferred_signal`: token ids of unanswered messages, for the next repair before a turn.
    - `eviction_scores`: of at most as many tokens as the budget has rows.
    - `block`: token ids appended since the last eviction, at most a block.
    - `peak`: most rows per head ever active, per layer.
    - `dirty`: a turn or repair is changing the session; its state is not the committed one.
    - `discarded`: the session was closed before its turn or repair ended; only an open restores it.
    - `opened_at`: monotonic seconds when this state of the session was opened.
    - `stored`: new rows go to the row store. False for scratch sessions and for rows that are
      stored already.
    - `keep_rows`: called with the position of the first of the new rows, and these rows
      `[n_layers, 2, n_kv_heads, t, head_dim]` on the device.
    - `keep_state`: called with the recurrent states that are kept.
    - `evictions`: number of times that rows left the active set since the session was opened.
    - `host_copy`: its rows in host memory, for retrieval, repairs and re-selections; None
      before the first of these, and while other sessions need the memory.
    - `configure`: builds the configuration for a length in rows.
    - `snapshot`: the recurrent states at the last page boundary that the slot has passed; of a model
      without any, of the first token. Kept while the session has a slot.
    - `dropped_tokens`: that it lost when the chat template rewrote earlier turns, ever.
    - `anchor`: of `snapshots`, the one before what the chat template may rewrite, which stays.
    - `snapshots`: stored recurrent states, see `workers.engine.snapshots`.
    - `side_length`: tokens that windows and states in the slot have seen; -1 if these are not the
      session's first ones, and must be read again.
    - `capabilities`: what the session does beyond attending to its active rows; empty before its
      first turn (`workers.capabilities`).
    """

    config: SessionConfig
    queries: RecentQueries
    length: int = 0
    page_ids: list[PageId] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    unsettled: int = 0
    again: range = range(0)
    ahead: Ahead | None = None
    remembered: int = 0
    inexact_from: int | None = None
    recent: list[ChatMessage] = field(default_factory=list)
    deferred_signal: list[int] = field(default_factory=list)
    episode: ActiveEpisode = NO_EPISODE
    eviction_scores: EvictionScores = field(default_factory=EvictionScores)
    promoted_rows: int = 0
    distribution: Distribution | None = None
    turn_start: int = 0
    block: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    slot: int | None = None
    selection: Selection | None = None
    prefetched: "Future[Any] | None" = None
    preempted: SlotRows | None = None
    dirty: bool = False
    discarded: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    stored: bool = True
    writes: list["Future[Any]"] = field(default_factory=list)
    keep_rows: Callable[[int, Tensor], None] | None = None
    keep_state: Callable[[Snapshot], None] | None = None
    evictions: int = 0
    host_copy: HostCopy | None = None
    configure: Callable[[int], SessionConfig] | None = None
    dropped_tokens: int = 0
    anchor: int = 0
    snapshot: Snapshot = field(default_factory=Snapshot)
    snapshots: list[int] = field(default_factory=list)
    side_length: int = 0
    capabilities: Sequence[Capability] = ()

    @classmethod
    def create(
        cls, config: SessionConfig, configure: Callable[[int], SessionConfig] | None = None
    ) -> "WorkerSession":
        """Build a session without a token."""
        return cls(config, RecentQueries(config.kept_queries), configure=configure)

    @property
    def name(self) -> str:
        """The session's id."""
        return self.config.name

    @property
    def nbytes(self) -> int:
        """Bytes in memory beside a slot's rows, with an estimate of the objects themselves."""
        total = _SESSION_BYTES + self.eviction_scores.nbytes
        if self.selection is not None:
            total += self.selection.nbytes
        if self.distribution is not None:
            total += self.distribution.log_probs.nbytes
        total += sum(len(str(message)) for message in self.recent)
        return total + 64 * len(self.episode.segments)

    @property
    def resident(self) -> "ResidentSession | None":
        """The session with its slot; None while it is swapped out."""
        return None if self.slot is None else ResidentSession(self)

    @property
    def committed_rows(self) -> int:
        """Number of rows in the committed state."""
        return self.length if self.ahead is None else self.ahead.length

    @property
    def committed_pending(self) -> Sequence[int]:
        """Token ids behind the rows of the committed state."""
        return self.pending if self.ahead is None else self.ahead.pending

    @property
    def committed_tokens(self) -> int:
        """Number of tokens in the committed state, with rows and pending."""
        return self.committed_rows + len(self.committed_pending)

    def require_committed(self) -> None:
        """Raise UnknownSession for a session that has rows of its next prompt."""
        if self.ahead is not None:
            raise UnknownSession(f"session {self.name} has rows of its next prompt; open it again")

    @property
    def unread(self) -> list[int]:
        """Pending tokens that were never computed: the end of the last answer."""
        return self.pending[self.unsettled :]

    def observed_window(self) -> Observed:
        """The queries that evictions look at, of those that are kept."""
        return self.queries.observed().last(self.config.method.observation.window)

    def record_evicted(self, tokens: Tensor, scores: Tensor) -> None:
        """Record the scores with which tokens, int `[k]`, each once, were evicted."""
        self.evictions += 1
        self.eviction_scores = self.eviction_scores.updated(tokens, scores, self.config.budget)

    def target(self, layer: int) -> int:
        """Rows per head that an eviction keeps: with the reserve while promoted rows fill it."""
        return self.config.layer_rows[layer] + (self.config.reserve if self.promoted_rows else 0)

    def clear_turn(self) -> None:
        """Clear the turn's observations: a session resumed in between then evicts the same rows."""
        self.queries.clear()
        self.block.clear()
        self.inexact_from = None
        self.remembered = 0
        for capability in self.capabilities:
            capability.clear_turn()

    def forget_last(self, tokens: int) -> None:
        """Drop what was observed of the turn's last tokens."""
        if tokens:
            self.queries.drop_last(tokens)
            self.block = self.block[: max(0, len(self.block) - tokens)]

    def drop_host_copy(self) -> None:
        """Free the copy of the rows in host memory."""
        self.host_copy = None
        for capability in self.capabilities:
            capability.drop_host_copy()

    def find_retriever(self) -> Retriever | None:
        """Return what finds rows for the session's next pass; None if nothing does."""
        found = (capability.retriever for capability in self.capabilities)
        return next((retriever for retriever in found if retriever is not None), None)

    def active_selection(self, cache: ActiveCache) -> Selection | None:
        """The active rows, in the slot or swapped out; None before the first token."""
        if self.slot is None:
            return self.selection
        accumulates = bool(self.config.method.observation.accumulate)
        return Selection.from_slot(cache, self.slot, accumulated=accumulates)

    def update_peak(self, cache: ActiveCache) -> None:
        """Raise `peak` to what the slot has held, while the session has one."""
        if self.slot is not None:
            peak = cache.peak[:, self.slot].tolist()
            self.peak = [max(a, b) for a, b in zip(self.peak or peak, peak, strict=True)]

    def create_scratch(self, episode: ActiveEpisode) -> "WorkerSession":
        """Build an empty session of the same configuration in `episode`; it stores no rows."""
        queries = RecentQueries(self.queries.width)
        return WorkerSession(self.config, queries, episode=episode, stored=False)


@dataclass(frozen=True)
class ResidentSession:
    """A session that has a slot of the active cache, until it is swapped out.

    A job may be preempted between two of its steps, and goes on in another slot.
    """

    session: WorkerSession

    @property
    def slot(self) -> int:
        """The session's slot now."""
        assert self.session.slot is not None, "only a session in a slot is worked on"
        return self.session.slot

    @property
    def config(self) -> SessionConfig:
        """The session's configuration."""
        return self.session.config
