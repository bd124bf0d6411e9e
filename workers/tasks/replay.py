"""Replay: appends a session's logged turns again, token by token, with its own method and budget.

It restores rows that no tier has any more, and the state of a session at the end of an earlier
turn. Blocks, decoding steps, evictions and re-selections fall where they fell the first time, and
logged repairs are applied again. Other movements of rows are not: repairs that are no longer
logged, swaps of rows, switches of episodes, re-selections between the place where an answer ends
and the stop string that ended it. Rows that were computed after such a movement may differ, because
other rows were active then.

Rows that a later turn dropped, since the chat template rewrote their tokens, are computed again for what
was evicted meanwhile. They restore nothing.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.gather import ReadKeys, split_by_page
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.eviction.evict import kept_by_position, select_by_position
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.side_content import fill_side
from workers.engine.stored.store_io import map_store_errors
from workers.generation.prefill import find_block_end, prefill
from workers.generation.settling import drop_rows, settle
from workers.generation.steps import Steps, wait_alike
from workers.model.tokenizer import Segment, keep_recent
from workers.primitives.selection import mask_to_indices
from workers.repair.promotion import RowSwap, apply_swap, expand_to_heads, missing_rows
from workers.tasks.logged_tokens import LoggedTokens, count_pending, fold_turns
from workers.tasks.rewinding import Rewinds, find_floor, rewind
from workers.tasks.step import prepare_step


def replay(
    engine: Engine,
    resident: ResidentSession,
    turns: Sequence[pb.LoggedTurn],
    rows: "ReplayRows",
    *,
    skipped: int = 0,
    length: int = 0,
) -> Steps[None]:
    """Replay a session's turns: all of them, to restore the state after them; or until no row is missing.

    The first `skipped` of them are loaded already (`skip_untouched`). `length`: rows are missing, and
    the state after so many rows is as well: behind the last turn, or behind what was settled after it.
    """
    session = resident.session
    restores = bool(rows.missing) and not length
    session.keep_rows = rows.keep
    log = fold_turns(turns[:skipped])
    for turn in turns[:skipped]:
        _note_messages(session, turn)
    rewinds = Rewinds(frozenset(turn.rewrite.kept for turn in turns if turn.HasField("rewrite")))
    rewinds.keep(session.snapshot)
    session.keep_state = rewinds.keep
    for number, turn in enumerate(turns[skipped:], skipped + 1):
        if restores and not rows.missing:
            break
        rows.floor = find_floor(turns, number - 1)
        rewritten = log.rewritten(turn)
        if turn.HasField("rewrite"):
            yield from _rewind(engine, resident, turn, rewritten, rows, rewinds)
        rows.floor = find_floor(turns, number)
        yield from _replay_turn(engine, resident, turn, rows)
        log = log.after(turn)
        _note_messages(session, turn)
    if rows.missing or session.length < length:  # what was settled after the last turn
        rows.begin_turn(session.length)
        yield from settle(engine, resident, source=rows)
    session.keep_rows = session.keep_state = None


def _note_messages(session: WorkerSession, turn: pb.LoggedTurn) -> None:
    """Note what a turn said, as far as later ones build on it."""
    messages = [convert.to_chat(message) for message in turn.messages]
    session.recent = keep_recent([*session.recent, *messages])
    # A turn that defers its repair has no answer: its tokens follow those deferred before.
    deferred = [*session.deferred_signal, *turn.token_ids]
    session.deferred_signal = deferred[len(deferred) - turn.deferred_tokens :]


def _rewind(
    engine: Engine,
    resident: ResidentSession,
    turn: pb.LoggedTurn,
    rewritten: LoggedTokens,
    rows: "ReplayRows",
    rewinds: Rewinds,
) -> Steps[None]:
    """Go back to where a turn rewrote the session, with what was settled in the pause before."""
    session = resident.session
    rows.begin_turn(session.length)
    if turn.rewrite.rows > session.length:
        yield from settle(engine, resident, source=rows)
    rewinds.restore(session, turn.rewrite.kept)
    yield from rewind(engine, resident, turn.rewrite.kept, rewritten.pending)


def _replay_turn(
    engine: Engine,
    resident: ResidentSession,
    turn: pb.LoggedTurn,
    rows: "ReplayRows",
) -> Steps[None]:
    """Replay one turn as `workers.tasks.turn` runs it, without sampling: the tokens are known.

    Of a session that recalls, rows that it dropped at its end are computed only where they share a
    block, or are read by a step whose row stayed: they change nothing of what stays.
    """
    session = resident.session
    rows.begin_turn(session.length)
    yield from settle(engine, resident, source=rows)
    session.clear_turn()
    session.turn_start = session.length
    token_ids = [*session.pending, *turn.token_ids]
    stop = session.length + len(token_ids) - count_pending(turn)
    pending = token_ids[stop - session.length :]
    rows.begin_turn(session.length, stop)
    promoted = [position for position in turn.promoted if position < session.length]
    _promote_logged(engine, resident, promoted, rows)

    def before_step(output_tokens: int) -> Steps[None]:
        yield from prepare_step(engine, resident, output_tokens, rows)

    steps = list(turn.token_ids[turn.prompt_tokens - turn.recorded_tokens : turn.prompt_tokens])
    prompt = token_ids[: len(session.pending) + turn.prompt_tokens - len(steps)]
    cuts = (turn.shared_tokens, turn.remembered_behind)
    if resident.config.recalls:
        prompt = prompt[: find_block_end(engine, session, stop - session.length, cuts)]
    session.pending = []
    yield from prefill(
        engine,
        resident,
        [Segment(tuple(prompt), recorded=False)],
        keep_distribution=False,
        on_prompt_end=lambda: None,
        answers=turn.output_tokens > 0 or bool(steps),
        before_step=before_step,
        source=rows,
        cuts=cuts,
    )
    output = turn.token_ids[turn.prompt_tokens :][: max(0, turn.output_tokens - 1)]
    for appended, token in (*enumerate(steps), *enumerate(output)):
        if resident.config.recalls and session.length >= stop:
            break
        yield from before_step(appended)
        engine.forward([resident], torch.tensor([[token]]))
        yield None
    _end_turn(engine, resident, stop, turn)
    session.pending = pending


def _end_turn(engine: Engine, resident: ResidentSession, stop: int, turn: pb.LoggedTurn) -> None:
    """End a turn as it ended: keep the rows before `stop`."""
    unsettled = turn.unsettled_tokens
    dropped = unsettled + turn.remembered_tokens
    session = resident.session
    engine.cache.clear_promoted(resident.slot)
    session.promoted_rows = 0
    drop_rows(engine, resident, stop)
    if resident.config.recalls and dropped:
        # The eviction has not seen the dropped rows that a replay leaves out: those that stay follow
        # from their number.
        for layer in range(engine.model.shape.n_layers):
            kept = kept_by_position(resident, engine.settings, layer, stop + dropped)
            if kept is not None:
                positions = engine.cache.read(resident.slot, layer).positions
                stays = (positions < kept[0]) | (positions >= kept[1])
                engine.cache.keep(resident.slot, layer, mask_to_indices(stays))
    session.unsettled = unsettled
    session.clear_turn()


def _promote_logged(
    engine: Engine, resident: ResidentSession, promoted: Sequence[int], rows: RowSource
) -> None:
    """Promote tokens as a repair did."""
    repair = resident.config.repair
    if promoted and not repair.swap:
        missing = missing_rows(engine.cache, resident.slot, resident.session.length)
        wanted = expand_to_heads(torch.tensor(sorted(promoted)), missing)
        with map_store_errors():
            apply_swap(engine.cache, rows, resident, RowSwap(wanted), torch.empty(0))


def skip_untouched(
    engine: Engine,
    resident: ResidentSession,
    turns: Sequence[pb.LoggedTurn],
    stop: int,
    intact: Collection[int] = (),
) -> Steps[int]:
    """Load the rows of the first turns, as far as it is known which are active; returns their number.

    All of them, while nothing was evicted; any number for a session that recalls. Rows from position
    `stop` on are not read. None can be skipped for methods that accumulate over every query. Of a model
    with recurrent states as many are as end with one that is stored (`intact`).
    """
    config = resident.config
    if config.method.observation.accumulate:
        return 0
    bounded = config.method.evicts and not config.recalls
    skipped = unsettled = dropped = 0
    log = found = LoggedTokens()
    for number, turn in enumerate(turns, 1):
        log = log.after(turn)
        if bounded and log.rows + turn.unsettled_tokens > min(config.layer_rows):
            break
        if log.rows > min(stop, find_floor(turns, number)):
            continue  # what the store has there is not this turn's
        if not engine.has_states or log.rows in intact:
            skipped, found, unsettled = number, log, turn.unsettled_tokens
            dropped = unsettled + turn.remembered_tokens
    yield from load_rows(engine, resident, found.rows, dropped)
    resident.session.pending = found.pending
    resident.session.unsettled = unsettled
    return skipped


def load_rows(
    engine: Engine, resident: ResidentSession, length: int, dropped: int = 0
) -> Steps[None]:
    """Load the first `length` rows from the store into an empty slot, the same in all heads.

    Where evictions select by position, only those that they have left, once `dropped` more were
    computed. Waits for a reader's thread. Raises RowsMissing and StorageFailed; then nothing has
    changed.
    """
    shape = engine.model.shape
    selection = [
        at.expand(shape.n_kv_heads, -1).contiguous()
        for at in select_by_position(resident, engine.settings, length, dropped)
    ]
    read = engine.store_io.read_slot(resident.session, selection, length)
    content = yield from wait_alike(engine, read)
    for layer, (at, (keys, values)) in enumerate(zip(selection, content.rows, strict=True)):
        promoted = torch.zeros(at.shape, dtype=torch.bool)
        engine.cache.insert(resident.slot, layer, at.to(torch.int32), keys, values, promoted)
    resident.session.length = length
    if engine.caches.side is not None:
        fill_side(engine.caches.side, resident.session, content, shape)


@dataclass
class ReplayRows:
    """The rows that a replay reads: stored ones, and those that it computes itself.

    It restores the session's `missing` pages when they are complete.

    `running`: pages of the replayed turn from position `stop` on, and of earlier turns from `floor` on,
    where a later turn goes back to. They are read until the turn, or the later one, drops them. In their
    place the store has none, or those of later turns.
    """

    store: RowStore
    session: str
    missing: dict[int, Tensor | None]
    running: dict[int, Tensor] = field(default_factory=dict)
    stop: int = sys.maxsize
    floor: int = sys.maxsize
    end: int = 0

    def begin_turn(self, length: int, stop: int = sys.maxsize) -> None:
        """Collect the rows before position `stop` from now on; by default all.

        length: rows that the session has now. Those behind them are dropped.
        """
        self.stop = min(stop, self.floor)
        pages = length // self.layout.page_tokens
        self.running = {page: rows for page, rows in self.running.items() if page < pages}

    def keep(self, start: int, rows: Tensor) -> None:
        """Collect rows of `[n_layers, 2, n_kv_heads, t, head_dim]` from position `start` on."""
        self.end = start + rows.shape[3]
        page_tokens = self.layout.page_tokens
        for begin, end in split_by_page(start, self.end, page_tokens):
            page = begin // page_tokens
            part = rows.narrow(3, begin - start, end - begin)
            if begin >= self.stop:
                self._fill(self.running.get(page), page, begin, part)
            elif page in self.missing:
                self._fill(self.missing[page], page, begin, part)
                if end % page_tokens == 0:
                    self._restore(page)

    @property
    def layout(self) -> PageLayout:
        """Shape of a page."""
        return self.store.layout

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Read keys as the store does, incomplete pages included. Raises the store's errors."""
        collected = self._collected()
        stored = [page for page in pages if page not in collected]
        read = self.store.read_keys(session, stored)
        found = dict(zip(stored, read.keys, strict=True))
        for page in collected.keys() & set(pages):
            filled = self.end - page * self.layout.page_tokens
            found[page] = collected[page][: self.layout.n_layers, 0, :, : max(0, filled)]
        return ReadKeys([found[page] for page in pages], read.bytes_read)

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather as the store does, incomplete pages included. Raises the store's errors."""
        page_tokens = self.layout.page_tokens
        collected = self._collected()
        pages = torch.tensor(sorted(collected), dtype=torch.int64)
        masks = [
            torch.isin(positions // page_tokens, pages) & (positions >= 0)
            for positions in selection
        ]
        stored = [
            positions.masked_fill(mask, -1)
            for positions, mask in zip(selection, masks, strict=True)
        ]
        gathered = self.store.gather_selection(session, stored)
        for layer, (positions, mask) in enumerate(zip(selection, masks, strict=True)):
            for head, index in mask.nonzero().tolist():
                page, offset = divmod(int(positions[head, index]), page_tokens)
                for into, rows in zip(gathered[layer], collected[page][layer], strict=False):
                    into[head, index] = rows[head, offset]
        return gathered

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather one layer, as `gather_selection`."""
        selection = [positions[:, :0]] * self.layout.n_layers
        selection[layer] = positions
        return self.gather_selection(session, selection)[layer]

    def page_ids(self, session: str, pages: Sequence[int]) -> list[PageId | None]:
        """Ids of pages as the store gives them; none for those that are read from here and may change."""
        collected = self._collected()
        stored = [page for page in pages if page not in collected]
        found = dict(zip(stored, self.store.page_ids(session, stored), strict=True))
        return [found.get(page) for page in pages]

    def hold_pages(self, session: str, pages: Sequence[int]) -> list[Tensor]:
        """Read pages as the store does, incomplete ones included. Raises the store's errors."""
        collected = self._collected()
        stored = [page for page in pages if page not in collected]
        found = collected | dict(zip(stored, self.store.hold_pages(session, stored), strict=True))
        return [found[page] for page in pages]

    def _collected(self) -> dict[int, Tensor]:
        """The pages that are read from here, by index."""
        kept = {page: rows for page, rows in self.missing.items() if rows is not None}
        return kept | self.running

    def _fill(self, kept: Tensor | None, page: int, begin: int, rows: Tensor) -> None:
        """Copy rows from position `begin` on, all of one page, into what is collected of it."""
        page_tokens = self.layout.page_tokens
        if kept is None:
            kept = torch.empty(*self.layout.rows_shape(page_tokens), dtype=rows.dtype)
        kept.narrow(3, begin % page_tokens, rows.shape[3]).copy_(rows)
        (self.running if begin >= self.stop else self.missing)[page] = kept

    def _restore(self, page: int) -> None:
        rows = self.missing[page]
        assert rows is not None, "the page was just filled"
        self.store.restore(self.session, page, rows)
        del self.missing[page]
