"""Connects model, cache, store and tokenizer for one session at a time; no algorithm of its own."""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId
from kvrecall.metrics.page import Metrics
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.tenant_threads import TenantThreads
from kvstore.index.key_codes import code_bytes
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import BlockAttention, ForwardStep
from workers.engine import memory_report, recording
from workers.engine.eviction.evict import evict, over_budget
from workers.engine.host.cache import HostCache
from workers.engine.long_sessions import LongSessions
from workers.engine.selection_heads import join_heads
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.session_factory import build_config
from workers.engine.session_state import build_state, restore_state, selection_from_state
from workers.engine.settings import WorkerSettings
from workers.engine.side_content import fill_side
from workers.engine.snapshots import Snapshot
from workers.engine.stored.page_naming import name_appended, read_ids
from workers.engine.stored.store_io import SlotContent, StoreIO, map_store_errors
from workers.engine.stored.stored_sessions import StoredSessions
from workers.engine.usage import UsageMeter
from workers.errors import BadSettings, IncompatibleState, StaleEpoch, UnknownSession
from workers.metrics.catalogue import create_metrics
from workers.model.decoding.captured import CapturedSteps
from workers.model.decoding.cuda_capture import CudaCapture
from workers.model.decoding.step_decoder import StepDecoder
from workers.model.grammars import Grammars
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.native.attention import NativeAttention
from workers.parallel.group import Group
from workers.primitives.observation import Observed
from workers.retrieval.device_search import DeviceSearch
from workers.retrieval.sampling import ROTATIONS

# Prompts, and grammars, of one tenant that may wait for a thread.
_MOST_WAITING = 1024


@dataclass(frozen=True)
class Parts:
    """Dependencies of an engine.

    `states` is the store of recurrent states, of a model with such layers.

    `layer_sensitivity` is how much eviction moves each layer's keys (EpiCache's s_l), where it was
    measured for this model; `measure_sensitivity` measures it, one forward pass after the other.
    """

    model: LoadedModel
    tokenizer: ChatTokenizer
    store: RowStore
    settings: WorkerSettings
    layer_sensitivity: tuple[float, ...] | None = None
    measure_sensitivity: "Callable[[], Generator[None, int, tuple[float, ...]]] | None" = None
    metrics: Metrics = field(default_factory=create_metrics)
    sandbox: SandboxSettings | None = None
    states: RowStore | None = None


class Engine:
    """The sessions of one worker: life cycle, swapping, forward passes, write-through and state.

    Not thread-safe: one thread, the scheduler's, calls it.
    """

    def __init__(self, parts: Parts) -> None:
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.grammars = Grammars(parts.tokenizer, parts.sandbox)
        self.stored = StoredSessions(parts.store, parts.states)
        self.settings = parts.settings
        self.metrics = parts.metrics
        self.layer_sensitivity = parts.layer_sensitivity
        self.measure_sensitivity = parts.measure_sensitivity
        settings = parts.settings
        self.caches = self.model.create_caches(
            settings.slots, settings.slot_rows, settings.longest_pass
        )
        self.native = (
            NativeAttention.open(ROTATIONS, self.group) if settings.native_attention else None
        )
        self.decoder = self._choose_decoder()
        # Kernels read the rows of all layers on one device.
        of_codes = settings.device_codes_bytes if self.model.on_one_device else 0
        self.on_device = DeviceSearch.open(self.cache.transfers, of_codes, self.group)
        self.long_sessions = LongSessions(parts.model, settings, parts.store.layout.page_tokens)
        self.sessions: dict[str, WorkerSession] = {}
        # A store without memory holds nothing.
        memory = parts.store.memory or RamTier(0)
        layout = parts.store.layout
        self.host_cache = HostCache(memory, layout.page_bytes, code_bytes(layout))
        self.host_cache.register(self._drop_copy)
        self.lost_pages = 0
        self.rebuilt_pages = 0
        self.prefilled_tokens = 0
        self.usage = UsageMeter()
        self.passed_tokens = 0
        self.store_io = StoreIO(self.stored, self.cache.transfers, self.caches.side)
        self.renderer = TenantThreads(3, _MOST_WAITING, "render", at_once=2)
        self.compiler = TenantThreads(3, _MOST_WAITING, "compile", at_once=2)

    @property
    def cache(self) -> ActiveCache:
        """The active rows."""
        return self.caches.active

    @property
    def group(self) -> Group:
        """The ranks that have the model's other heads."""
        return self.model.group

    @property
    def store(self) -> RowStore:
        """The store of rows."""
        return self.stored.rows

    @property
    def has_states(self) -> bool:
        """True if the model has layers with recurrent states."""
        return self.caches.side is not None and self.caches.side.states is not None

    # Life cycle

    def open(self, spec: pb.SessionSpec, state: pb.SessionState) -> WorkerSession:
        """Open the session exactly as `state`; it gets a slot when it first runs.

        For callers without a scheduler. The scheduler's jobs do the same without waiting for the
        store (`workers/tasks/open.py`). Raises BadSettings, UnknownMethod, StaleEpoch,
        IncompatibleState and StorageFailed.
        """
        session = self.create_empty(spec, state)
        with map_store_errors():
            pages = read_ids(state.page_ids)
            self.stored.open(spec.session, pages, state.snapshots, spec.page_key)
        self.restore(session, state)
        return session

    def create_empty(self, spec: pb.SessionSpec, state: pb.SessionState) -> WorkerSession:
        """Create a session without tokens or stored rows, to be restored to `state`.

        Discards the session of that name, if one is open. Raises as `admit`.
        """
        session = self.admit(spec, state)
        if known := self.sessions.get(spec.session):
            self.discard(known)
        session.stored = False
        session.dirty = True
        self.sessions[session.name] = session
        return session

    def restore(self, session: WorkerSession, state: pb.SessionState) -> None:
        """Restore an empty session to `state`, whose rows are in the store."""
        restore_state(session, state, self.group)
        named = len(session.page_ids) * self.store.layout.page_tokens
        if named != state.length:
            raise IncompatibleState(
                f"session {session.name} has {state.length} rows, but ids of pages for {named}; "
                "open it again"
            )
        self.fit_budget(session)
        session.stored = True
        session.dirty = False

    def admit(self, spec: pb.SessionSpec, state: pb.SessionState) -> WorkerSession:
        """Build the session that `create_empty` would add, without adding it.

        Raises BadSettings, UnknownMethod, StaleEpoch and IncompatibleState.
        """
        known = self.sessions.get(spec.session)
        if known and spec.epoch < known.config.epoch:
            raise StaleEpoch(
                f"session {spec.session}: epoch {spec.epoch} came after {known.config.epoch}"
            )
        configure = partial(
            build_config,
            spec,
            self.model,
            self.settings,
            self.layer_sensitivity,
            tuple(state.layer_rows),
        )
        session = WorkerSession.create(configure(state.length), configure)
        if not self.cache.has_room(self.bound(session)):
            raise BadSettings(
                f"session {spec.session}: its method gives more rows to the layers of one device than a "
                "slot has there; lower its budget, or take a method that gives all layers as many"
            )
        selection = selection_from_state(state, self.group)
        active = selection.rows_per_head() if selection else [0] * self.model.shape.n_layers
        for layer, (rows, bound) in enumerate(zip(active, self.bound(session), strict=True)):
            if rows > bound:
                raise BadSettings(
                    f"session {spec.session} has {rows} active rows per head in layer {layer}, "
                    f"more than the {bound} that its budget and this worker's max_budget and "
                    "block allow"
                )
        return session

    def session(self, name: str, epoch: int | None = None) -> WorkerSession:
        """Get an open session. Raises UnknownSession, or StaleEpoch when `epoch` is not its epoch.

        A session whose turn or repair broke off is not open: its state is not the committed one.
        """
        session = self.sessions.get(name)
        if session is None:
            raise UnknownSession(f"session {name} is not open in this worker")
        if session.discarded:
            raise UnknownSession(
                f"session {name} was interrupted in the middle of a turn or repair; open it again"
            )
        if epoch is not None and epoch != session.config.epoch:
            raise StaleEpoch(
                f"session {name}: epoch {epoch}, but it was opened with {session.config.epoch}"
            )
        return session

    def resident(self, name: str) -> ResidentSession:
        """Get an open session with its slot. Raises UnknownSession, also for one swapped out."""
        resident = self.session(name).resident
        if resident is None:
            raise UnknownSession(f"session {name} is swapped out; swap it in first")
        return resident

    def delete_pages(self, pages: Sequence[PageId]) -> "Future[frozenset[PageId]]":
        """Delete pages that no session has any more, but those of sessions that are open here.

        The result is those that were here.
        """
        return self.store_io.submit_durable(lambda: self.stored.delete(pages))

    def release(self, name: str, epoch: int) -> "Future[None]":
        """Release a session that moved to another worker.

        Nothing happens if it was opened here with a later epoch than `epoch`. One that was unloaded
        may still have copies of its rows here.
        """
        session = self.sessions.get(name)
        if session is not None and session.config.epoch > epoch:
            return self.store_io.submit(lambda: None)
        if session is not None:
            del self.sessions[name]
            self.discard(session)
        return self.store_io.submit(lambda: self.stored.release(name))

    def unload(self, name: str) -> "Future[None]":
        """Close a session; its rows stay in all tiers. Only an open brings it back."""
        if session := self.sessions.pop(name, None):
            self.discard(session)
        return self.store_io.submit(lambda: self.stored.close_session(name))

    def discard(self, session: WorkerSession) -> None:
        """Free the session's slot and cancel its writes; only an open restores it. Idempotent."""
        session.discarded = True
        for write in session.writes:
            write.cancel()
        session.writes.clear()
        session.selection = None
        session.preempted = None
        session.distribution = None
        session.keep_rows = session.keep_state = None
        session.snapshot = Snapshot()
        self.drop_host_copy(session)
        if session.slot is not None:
            self.cache.release(session.slot)
            session.slot = None

    def drop_host_copy(self, session: WorkerSession) -> None:
        """Free the session's copy of its rows in host memory, if it has one."""
        if session.host_copy is not None:
            session.drop_host_copy()
            self.host_cache.free(session.name)

    def close(self) -> None:
        """Finish all rendering, and all reads and writes of the store."""
        self.grammars.close()
        for threads in (self.renderer, self.compiler):
            threads.close()
        self.store_io.close()

    def bound(self, session: WorkerSession) -> list[int]:
        """Rows per head that the session never exceeds, per layer.

        M_l + reserve + retrieved rows + block + patched prompt (design section 4).
        """
        block = self.settings.block_tokens
        prompt = self._prompt_rows(session)
        config = session.config
        if not config.method.evicts:
            return [self.settings.max_budget + block] * self.model.shape.n_layers
        if config.automatic:
            return [self.settings.max_budget + block + prompt] * self.model.shape.n_layers
        more = config.reserve + config.retrieved + block + prompt
        return [rows + more for rows in config.layer_rows]

    def fit_budget(self, session: WorkerSession, length: int | None = None) -> None:
        """Fit budget and retrieved rows to `length` rows, by default those that the session has.

        A function of the length alone, so that a session that is opened again has the same.
        """
        if session.config.follows_length and session.configure is not None:
            session.config = session.configure(session.length if length is None else length)

    # Slots

    def swap_in(self, session: WorkerSession) -> ResidentSession:
        """Give the session a slot with the rows of its selection. A slot must be free.

        Returns a resident session as it is, unless its slot is stale. Raises RowsMissing or
        StorageFailed; then nothing has changed.
        """
        if self.is_stale(session):
            self.swap_out(session)
        if session.slot is not None:
            return ResidentSession(session)
        if session.preempted is not None:
            session.slot = self.cache.put_back(session.preempted)
            session.preempted = session.selection = None
            self.metrics.inc("worker_swaps_total", direction="in")
            return ResidentSession(session)
        # Read before the slot is claimed: a failed read changes nothing.
        read = self.store_io.fetch(session)
        selection = session.selection
        session.prefetched = None
        content = SlotContent([]) if read is None else read.result()
        started = time.perf_counter()
        slot = self.cache.claim(self.bound(session))
        session.slot = slot
        session.selection = None
        for layer, (keys, values) in enumerate(content.rows):
            assert selection is not None, "rows were read for a selection"
            self.cache.fill(slot, layer, selection.with_rows(layer, keys, values))
        if self.caches.side is not None:
            fill_side(self.caches.side, session, content, self.model.shape)
        self.metrics.inc("worker_swaps_total", direction="in")
        self.metrics.observe("worker_swap_seconds", time.perf_counter() - started)
        return ResidentSession(session)

    def swap_out(self, session: WorkerSession) -> None:
        """Free the session's slot. No row is copied: all are in the store already."""
        if session.slot is None:
            return
        session.update_peak(self.cache)
        session.selection = session.active_selection(self.cache)
        self.cache.release(session.slot)
        session.slot = None
        session.snapshot = Snapshot()
        self.metrics.inc("worker_swaps_total", direction="out")

    def is_stale(self, session: WorkerSession) -> bool:
        """Check if a session's slot lacks windows or states, so that it must be filled again."""
        return (
            self.caches.side is not None
            and session.slot is not None
            and session.side_length != session.length
        )

    def preempt(self, session: WorkerSession) -> None:
        """Free the slot of a session in the middle of a job: its rows wait in host memory.

        The next `swap_in` restores them as they were. What is computed is the same to the bit.
        """
        assert session.slot is not None, "only a session in a slot is preempted"
        session.update_peak(self.cache)
        session.selection = session.active_selection(self.cache)
        session.preempted = self.cache.take(session.slot)
        session.snapshot = session.snapshot.to_host()
        session.slot = None
        self.metrics.inc("worker_swaps_total", direction="out")
        self.metrics.inc("worker_preemptions_total")

    # Forward passes

    def forward(
        self,
        residents: Sequence[ResidentSession],
        token_ids: Tensor,
        logits_to_keep: int = 1,
        attention: BlockAttention | None = None,
    ) -> Tensor:
        """Append `token_ids` int64 `[B, t]` to B sessions and write their rows to the store.

        Returns logits float32 `[B, logits_to_keep, vocabulary]`; evicts first where a slot has no
        room. `attention`: of one session's block. After an exception no session has been appended to.
        """
        tokens = token_ids.shape[1]
        for resident in residents:
            self.make_room(resident, tokens)
        observe = max(recording.observed_tokens(resident.session, tokens) for resident in residents)
        step = self._begin_step(residents, tokens, observe)
        recording.begin(step, residents, attention, self.native, self.on_device)
        try:
            if self.decoder is not None and self.decoder.takes(step):
                logits = self.decoder.forward(token_ids, step)
            else:
                logits = self.model.forward(token_ids, step, logits_to_keep)
            for resident in residents:
                self.usage.add(resident.session.name, "prefilled", tokens)
            recorded = [
                recording.record(self.cache, resident, token_ids[index], step, index, self.settings)
                for index, resident in enumerate(residents)
            ]
        except BaseException:
            step.undo()
            raise
        step.commit()
        self.passed_tokens += token_ids.numel()
        for index, (resident, part) in enumerate(zip(residents, recorded, strict=True)):
            self._append_recorded(resident, part, token_ids[index].tolist())
        recording.end(step, residents, self.metrics)
        return logits

    def observe(self, resident: ResidentSession, token_ids: Sequence[int]) -> Observed:
        """Forward `token_ids` over the active rows and return their post-RoPE queries.

        The cache is restored afterwards (EpiCache section 2.2). At most `block_tokens` tokens.
        """
        assert len(token_ids) <= self.settings.block_tokens, "a longer prompt runs block by block"
        self.make_room(resident, len(token_ids))
        step = self._forward_transient(resident, token_ids)
        return Observed(tuple(queries[0] for queries in step.observed), step.query_positions[0])

    def observe_patched(self, resident: ResidentSession, episode: Sequence[int]) -> Observed | None:
        """Observe the method's patched prompts, with an episode's; None for a method without one.

        Evictions and builds of episodes see the same prompts: the last `episode_tokens` of the
        episode's, in pieces of at most `prompt_tokens`. The cache is restored afterwards.
        """
        observation = resident.config.method.observation
        prompts = observation.patched_prompts(
            self.tokenizer.encode(observation.prompt),
            resident.session.block,
            episode[-self.settings.episode_tokens :],
            min(self.settings.prompt_tokens, self.cache.free_rows(resident.slot)),
        )
        if not prompts:
            return None
        steps = (self._forward_transient(resident, prompt) for prompt in prompts)
        return Observed.concatenate([recording.observe_prompt(step) for step in steps])

    def evict(self, resident: ResidentSession, *, turn_over: bool = False) -> None:
        """Bring the session back into its budget; a session within it stays as it is.

        `turn_over`: the turn's own rows are no longer protected.
        """
        self.fit_budget(resident.session)
        if over_budget(self.cache, resident):
            session = resident.session
            observed = self.observe_patched(resident, session.episode.patched_prompt)
            observed = observed or session.observed_window()
            rows = evict(self.cache, resident, self.settings, observed, turn_over=turn_over)
            self.metrics.inc("eviction_rows_total", rows, method=session.config.method.name)
            session.block.clear()

    def make_room(self, resident: ResidentSession, rows: int) -> None:
        """Evict unless so many rows per head and layer can be added within the session's bound."""
        free = self.cache.free_rows(resident.slot) - self._prompt_rows(resident.session)
        if free < rows:
            self.evict(resident)

    @property
    def state_interval(self) -> int:
        """Tokens whose rows take as many bytes as a recurrent state."""
        side = self.caches.side
        nbytes = 0 if side is None else side.shape.state_bytes
        return -(-nbytes // self.store.layout.token_bytes)

    # State

    def snapshot(self, session: WorkerSession) -> pb.SessionState:
        """Build the session's state, everything but its rows."""
        return build_state(session, self.cache)

    def memory(self, session: WorkerSession) -> pb.MemoryReport:
        """Report the session's rows and bytes, active and stored, of all ranks."""
        session.update_peak(self.cache)
        selection = join_heads(session.active_selection(self.cache), self.group)
        own = memory_report.build_report(
            session,
            selection,
            self.bound(session),
            self.model,
            self.store.usage(),
        )
        return memory_report.join_report(own, self.group)

    # Internals

    def _drop_copy(self, name: str) -> None:
        """Free the copy of a session without a job; the host cache calls it on any thread."""
        if session := self.sessions.get(name):
            session.drop_host_copy()

    def _prompt_rows(self, session: WorkerSession) -> int:
        """Rows per head that are kept free for a patched prompt."""
        uses_prompt = session.config.method.observation.uses_patched_prompt
        return self.settings.prompt_tokens if uses_prompt else 0

    def _append_recorded(
        self,
        resident: ResidentSession,
        recorded: recording.Recorded,
        token_ids: Sequence[int],
    ) -> None:
        """Update length and observations, and pass the rows to the store and to `keep_rows`."""
        session = resident.session
        start = session.length
        tokens = recorded.rows.shape[3]
        session.length += tokens
        session.side_length = session.length
        session.queries = recorded.queries
        session.block = recorded.block
        for layer, amounts in enumerate(recorded.received):
            self.cache.accumulate(resident.slot, layer, amounts)
        if session.keep_rows is not None:
            session.keep_rows(start, recorded.rows)
        if session.stored:
            # Rows of steps behind the last state that can be kept are computed again.
            final = session.inexact_from is None or not session.config.recalls
            final = final and not (self.has_states and tokens == 1)
            pages = name_appended(self.store, session, token_ids, self.group) if final else []
            self.store_io.append(session, start, recorded.rows, pages, final=final)

    def _forward_transient(
        self, resident: ResidentSession, token_ids: Sequence[int]
    ) -> ForwardStep:
        """Forward tokens over the active rows and drop their rows again."""
        step = self._begin_step([resident], len(token_ids), len(token_ids))
        try:
            self.model.forward(torch.tensor([token_ids]), step)
            self.usage.add(resident.session.name, "repaired", len(token_ids))
        finally:
            step.undo()
        self.passed_tokens += len(token_ids)
        return step

    def _choose_decoder(self) -> StepDecoder | None:
        """Choose what computes decode steps; None: the model's own operators."""
        graphs = self.settings.step_graphs
        whole = self.model.on_one_device and self.group.count == 1
        if graphs and whole and self.model.device.type == "cuda":
            return CapturedSteps(self.model.forward, CudaCapture(self.model.device), graphs)
        return self.model.decoder if self.settings.native_attention else None

    def _begin_step(
        self, residents: Sequence[ResidentSession], tokens: int, observe: int
    ) -> ForwardStep:
        lengths = [resident.session.length for resident in residents]
        slots = [resident.slot for resident in residents]
        if self.caches.side is not None:
            for slot, length in zip(slots, lengths, strict=True):
                self.caches.side.make_room(slot, length, tokens)
        positions = torch.tensor(lengths)[:, None] + torch.arange(tokens)
        static = tokens == 1 and self.decoder is not None and self.decoder.static
        step = self.caches.begin(slots, positions, min(observe, tokens), static=static)
        self.long_sessions.place(step, [resident.session for resident in residents])
        return step
