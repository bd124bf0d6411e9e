"""Connects model, cache, store and tokenizer for one session at a time; no algorithm of its own."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.store import RowStore
from workers.cache.active_cache import ActiveCache, ForwardStep
from workers.engine import memory_report as memory
from workers.engine.accumulation import accumulate
from workers.engine.eviction import evict, over_budget
from workers.engine.session import WorkerSession
from workers.engine.session_factory import new_session
from workers.engine.session_state import selection_of, snapshot, take_state
from workers.engine.settings import WorkerSettings
from workers.engine.store_io import StoreIO, shared_pages, storage
from workers.errors import BadSettings, StaleEpoch, UnknownSession
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.primitives.observation import Observed, causal_logsumexp


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    model: LoadedModel
    tokenizer: ChatTokenizer
    store: RowStore
    settings: WorkerSettings
    layer_sensitivity: tuple[float, ...] | None = None
    """How much eviction moves each layer's keys (EpiCache's s_l), where it was measured for this model."""


class Engine:
    """The sessions of one worker: opening, seating in slots, forward passes, write-through, state.

    Not thread-safe: one thread, the scheduler's, calls it.
    """

    def __init__(self, parts: Parts) -> None:
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.store = parts.store
        self.settings = parts.settings
        self.layer_sensitivity = parts.layer_sensitivity
        shape = self.model.shape
        rows = [
            self.settings.max_budget + self.settings.block_tokens + self.settings.prompt_tokens
        ] * shape.n_layers
        self.cache = ActiveCache(
            shape, self.settings.slots, rows, self.model.dtype, self.model.device
        )
        self.sessions: dict[str, WorkerSession] = {}
        self.lost_pages = self.rebuilt_pages = 0
        self.storing = StoreIO(self.store)

    # Sessions

    def open(self, spec: wire.SessionSpec, state: wire.SessionState) -> WorkerSession:
        """Make the session be exactly `state`; its rows are seated when it first runs.

        For whoever has no scheduler, whose jobs do the same without waiting for the store (`workers/tasks/open.py`).
        Raises BadSettings, UnknownMethod, StaleEpoch, StorageFailed.
        """
        session = self.blank(spec, state)
        with storage():
            self.store.open(
                session.name, epoch=session.epoch, length=state.length, shared=shared_pages(spec)
            )
        self.fill(session, state)
        return session

    def blank(self, spec: wire.SessionSpec, state: wire.SessionState) -> WorkerSession:
        """A session that has said nothing and stores nothing, which shall become `state`. Raises as `admit`."""
        session = self.admit(spec, state)
        if known := self.sessions.get(spec.session):
            self.abandon(known)
        session.stored = False
        session.unsettled = True
        self.sessions[session.name] = session
        return session

    def fill(self, session: WorkerSession, state: wire.SessionState) -> None:
        """Make a blank session be `state`, whose rows are in the store."""
        take_state(session, state)
        session.stored = True
        session.unsettled = False

    def admit(self, spec: wire.SessionSpec, state: wire.SessionState) -> WorkerSession:
        """The session that `blank` would make, if it may; nothing changes.

        Raises BadSettings, UnknownMethod, StaleEpoch.
        """
        known = self.sessions.get(spec.session)
        if known and spec.epoch < known.epoch:
            raise StaleEpoch(f"session {spec.session}: epoch {spec.epoch} came after {known.epoch}")
        session = new_session(spec, self.model, self.settings, self.layer_sensitivity)
        selection = selection_of(state)
        held = selection.held() if selection else [0] * self.model.shape.n_layers
        for layer, (rows, bound) in enumerate(zip(held, self.bound(session), strict=True)):
            if rows > bound:
                raise BadSettings(
                    f"session {spec.session} holds {rows} active rows per head in layer {layer}, more than the "
                    f"{bound} that its budget and this worker's max_budget and block allow"
                )
        return session

    def session(self, name: str, epoch: int | None = None) -> WorkerSession:
        """An open session. Raises UnknownSession, or StaleEpoch when `epoch` is not the session's.

        A session whose turn or repair broke off is not open: what it holds is not what was committed.
        """
        session = self.sessions.get(name)
        if session is None:
            raise UnknownSession(f"session {name} is not open in this worker")
        if session.abandoned:
            raise UnknownSession(
                f"session {name} was left in the middle of a turn or repair; open it again"
            )
        if epoch is not None and epoch != session.epoch:
            raise StaleEpoch(
                f"session {name}: epoch {epoch}, but it was opened with {session.epoch}"
            )
        return session

    def drop(self, name: str, keep_pages: int = 0) -> "Future[None]":
        """Forget a session: slot and rows, but for its first pages where others share them."""
        if session := self.sessions.pop(name, None):
            self.abandon(session)
        return self.storing.do(lambda: self.store.drop(name, keep_pages=keep_pages))

    def release(self, name: str, epoch: int) -> "Future[None]":
        """Let a session go that goes on in another worker, unless it was opened here under a later epoch."""
        session = self.sessions.get(name)
        if session is not None and session.epoch <= epoch:
            del self.sessions[name]
            self.abandon(session)
            return self.storing.do(lambda: self.store.release(name))
        return self.storing.do(lambda: None)

    def abandon(self, session: WorkerSession) -> None:
        """Free the session's slot and cancel its writes: only `open` can make it whole again. Harmless twice."""
        session.abandoned = True
        for write in session.writes:
            write.cancel()
        session.writes.clear()
        session.selection = session.distribution = session.keep_rows = None
        if session.slot is not None:
            self.cache.release(session.slot)
            session.slot = None

    def close(self) -> None:
        """Finish what is on its way to the store."""
        self.storing.close()

    def bound(self, session: WorkerSession) -> list[int]:
        """Rows per head that the session may never exceed, per layer: M_l + block + prompt (design section 4)."""
        block = self.settings.block_tokens
        prompt = self._reserve(session)
        if not session.method.evicts:
            return [self.settings.max_budget + block] * self.model.shape.n_layers
        return [rows + session.reserve + block + prompt for rows in session.layer_rows]

    # Slots

    def seat(self, session: WorkerSession) -> None:
        """Give the session a slot, with the rows of its selection. A slot must be free.

        Raises RowsMissing or StorageFailed, then nothing has changed.
        """
        if session.slot is not None:
            return
        # Read before the slot is taken: what cannot be read leaves the session as it was, and the slot free.
        arriving = self.storing.fetch(session)
        selection = session.selection
        session.arriving = None
        rows = list[tuple[Tensor, Tensor]]() if arriving is None else arriving.result()
        slot = self.cache.claim(self.bound(session))
        session.slot = slot
        session.selection = None
        for layer, (keys, values) in enumerate(rows):
            assert selection is not None, "rows were read for a selection"
            sums = selection.accumulated[layer] if selection.accumulated else None
            self.cache.insert(
                slot,
                layer,
                selection.positions[layer],
                keys,
                values,
                selection.promoted[layer],
                sums,
            )

    def unseat(self, session: WorkerSession) -> None:
        """Swap the session out. It costs no copy: its rows are in the store already."""
        if session.slot is None:
            return
        self._note_peak(session)
        session.selection = session.selected(self.cache)
        self.cache.release(session.slot)
        session.slot = None

    # Forward passes

    def forward(
        self, sessions: Sequence[WorkerSession], token_ids: Tensor, logits_to_keep: int = 1
    ) -> Tensor:
        """Say `token_ids` int64 `[B, t]` in B seated sessions, and write their rows through.

        Returns logits float32 `[B, logits_to_keep, vocabulary]`. Rows are evicted first where a slot would
        otherwise exceed its bound.
        """
        tokens = token_ids.shape[1]
        for session in sessions:
            self._make_room(session, tokens)
        step = self._step(sessions, tokens, max(_observes(session, tokens) for session in sessions))
        logits = self.model.forward(token_ids, step, logits_to_keep)
        for index, session in enumerate(sessions):
            self._said(session, token_ids[index], step, index)
        self._write_through(sessions, step)
        return logits

    def observe(self, session: WorkerSession, token_ids: Sequence[int]) -> Observed:
        """Run a prompt over the active rows, take its queries and forget it: nothing of it stays (EpiCache 2.2).

        Raises nothing for a long prompt: its last tokens that fit into a block are observed.
        """
        token_ids = token_ids[-self.settings.block_tokens :]
        self._make_room(session, len(token_ids))
        step = self._run_over(session, token_ids)
        return Observed(tuple(queries[0] for queries in step.observed), step.query_positions[0])

    def evict(self, session: WorkerSession, *, turn_over: bool = False) -> None:
        """Bring the session back into its budget; nothing happens within it."""
        if over_budget(self.cache, session):
            evict(self.cache, session, self.settings, self._observed(session), turn_over=turn_over)
            session.block.clear()

    # State

    def snapshot(self, session: WorkerSession) -> wire.SessionState:
        """Everything of the session that is not a row."""
        return snapshot(session, self.cache)

    def memory(self, session: WorkerSession) -> wire.MemoryReport:
        """What the session holds, of every kind."""
        self._note_peak(session)
        selection = session.selected(self.cache)
        return memory.report(
            session, selection, self.bound(session), self.model, self.store.usage()
        )

    # Inside

    def _reserve(self, session: WorkerSession) -> int:
        """Rows per head that are kept free for a patched prompt."""
        return self.settings.prompt_tokens if session.method.observation.uses_patched_prompt else 0

    def _make_room(self, session: WorkerSession, tokens: int) -> None:
        assert session.slot is not None, "only a session in a slot goes forward"
        if self.cache.free_rows(session.slot) - self._reserve(session) < tokens:
            self.evict(session)

    def _said(
        self, session: WorkerSession, token_ids: Tensor, step: ForwardStep, index: int
    ) -> None:
        """Note what the step's `index`-th session said, as far as its evictions look at it."""
        assert session.slot is not None, "only a session in a slot goes forward"
        observation = session.method.observation
        positions = step.query_positions[index]
        queries = [of_layer[index] for of_layer in step.observed]
        session.length += len(token_ids)
        session.queries.push(queries, positions)
        if observation.repeats_block:
            session.block = [*session.block, *token_ids.tolist()][-self.settings.block_tokens :]
        if observation.accumulate:
            accumulate(self.cache, session.slot, queries, positions, observation.accumulate)

    def _observed(self, session: WorkerSession) -> Observed:
        """What the session's method observes before an eviction: its patched prompts, or the turn's last queries."""
        assert session.slot is not None, "only a session in a slot evicts"
        observation = session.method.observation
        prompts = observation.patched_prompts(
            self.tokenizer.encode(observation.prompt),
            session.block,
            session.patched_prompt,
            min(self.settings.prompt_tokens, self.cache.free_rows(session.slot)),
        )
        if not prompts:
            return session.queries.observed()
        return Observed.concatenate(
            [_of_prompt(self._run_over(session, prompt)) for prompt in prompts]
        )

    def _run_over(self, session: WorkerSession, token_ids: Sequence[int]) -> ForwardStep:
        """Run tokens over the active rows and forget theirs."""
        assert session.slot is not None, "only a session in a slot observes"
        step = self._step([session], len(token_ids), len(token_ids))
        self.model.forward(torch.tensor([token_ids]), step)
        self.cache.drop_last(session.slot, len(token_ids))
        return step

    def _step(self, sessions: Sequence[WorkerSession], tokens: int, observe: int) -> ForwardStep:
        starts = torch.tensor([session.length for session in sessions])
        slots = [session.slot for session in sessions if session.slot is not None]
        return self.cache.begin_step(
            slots, starts[:, None] + torch.arange(tokens), min(observe, tokens)
        )

    def _write_through(self, sessions: Sequence[WorkerSession], step: ForwardStep) -> None:
        """Hand the step's rows over: to the store, and to whoever asked for them."""
        tokens = step.query_positions.shape[1]
        for index, session in enumerate(sessions):
            start = session.length - tokens
            rows = step.rows(index)
            if session.keep_rows is not None:
                session.keep_rows(start, rows)
            if session.stored:
                self.storing.append(session, start, rows)

    def _note_peak(self, session: WorkerSession) -> None:
        if session.slot is None:
            return
        peak = self.cache.peak[:, session.slot].tolist()
        session.peak = [max(a, b) for a, b in zip(session.peak or peak, peak, strict=True)]


def _of_prompt(step: ForwardStep) -> Observed:
    """What a patched prompt observed, with the weight of its own keys, which methods may count into the softmax."""
    queries = [q[0] for q in step.observed]
    keys = [k[0] for k in step.new_keys]
    return Observed(
        tuple(queries), step.query_positions[0], tuple(map(causal_logsumexp, queries, keys))
    )


def _observes(session: WorkerSession, tokens: int) -> int:
    """How many of the newest tokens' queries the session's method wants to see."""
    return tokens if session.method.observation.accumulate else session.queries.width
