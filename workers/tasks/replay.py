"""Replay: appends a session's logged turns again, token by token, with its own method and budget.

It restores rows that no tier has any more, and the state of a session at the end of an earlier
turn. Blocks, decoding steps, evictions and re-selections fall where they fell the first time, and
logged repairs are applied again. Other movements of rows are not: repairs that are no longer
logged, swaps of rows, switches of episodes, re-selections between the place where an answer ends
and the stop string that ended it. Rows that were computed after such a movement may differ, because
other rows were active then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.format.summaries import PageSummary
from kvstore.sessions.gather import ReadKeys
from kvstore.store import RowStore
from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.engine.store_io import map_store_errors
from workers.generation.prefill import prefill
from workers.generation.steps import Steps
from workers.model.tokenizer import Segment, keep_recent
from workers.repair.promotion import RowSwap, apply_swap, expand_to_heads, missing_rows
from workers.repair.reselection import StoredRows
from workers.tasks.step import prepare_step


def pending_after(turn: pb.LoggedTurn) -> list[int]:
    """Tokens pending at a turn's end: the last one generated, and an end of turn that was added."""
    if not turn.output_tokens:
        return []
    closing = len(turn.token_ids) - turn.prompt_tokens - turn.output_tokens
    return list(turn.token_ids[-1 - closing :])


def rows_after(turns: Sequence[pb.LoggedTurn]) -> int:
    """Count the rows of a session at the end of these turns, its first ones."""
    return sum(len(turn.token_ids) for turn in turns) - (
        len(pending_after(turns[-1])) if turns else 0
    )


def replay(
    engine: Engine,
    resident: ResidentSession,
    turns: Sequence[pb.LoggedTurn],
    lost: "ReplayRows | None" = None,
) -> Steps[None]:
    """Replay turns: all of them, to restore the state after them; or until no row is `lost`."""
    session = resident.session
    session.keep_rows = None if lost is None else lost.keep
    for turn in turns:
        if lost is not None and not lost.missing:
            return
        yield from _replay_turn(engine, resident, turn, engine.store if lost is None else lost)
        messages = [convert.to_chat(message) for message in turn.messages]
        session.recent = keep_recent([*session.recent, *messages])
        # A turn that defers its repair has no answer: its tokens follow those deferred before.
        deferred = [*session.deferred_signal, *turn.token_ids]
        session.deferred_signal = deferred[len(deferred) - turn.deferred_tokens :]


def _replay_turn(
    engine: Engine, resident: ResidentSession, turn: pb.LoggedTurn, rows: StoredRows
) -> Steps[None]:
    """Replay one turn as `workers.tasks.turn` runs it, without sampling: the tokens are known."""
    session = resident.session
    session.clear_turn()
    session.turn_start = session.length
    _promote_logged(engine, resident, turn.promoted, rows)
    prompt = turn.token_ids[: turn.prompt_tokens]
    output_end = turn.prompt_tokens + max(0, turn.output_tokens - 1)
    split = turn.prompt_tokens - turn.recorded_tokens
    segments = [
        Segment(tuple(prompt[:split]), recorded=False),
        Segment(tuple(prompt[split:]), recorded=True),
    ]

    def before_step(output_tokens: int) -> Steps[None]:
        yield from prepare_step(engine, resident, output_tokens, pb.ReselectionReport(), rows)

    yield from prefill(
        engine,
        resident,
        segments,
        keep_distribution=turn.recorded_tokens > 0,
        on_prompt_end=lambda: None,
        answers=turn.output_tokens > 0,
        before_step=before_step,
        source=rows,
    )
    for appended, token in enumerate(turn.token_ids[turn.prompt_tokens : output_end]):
        yield from before_step(appended)
        engine.forward([resident], torch.tensor([[token]]))
        yield None
    session.pending = pending_after(turn)
    engine.cache.clear_promoted(resident.slot)
    session.promoted_rows = 0
    engine.evict(resident, turn_over=True)
    session.clear_turn()


def _promote_logged(
    engine: Engine, resident: ResidentSession, promoted: Sequence[int], rows: RowSource
) -> None:
    """Promote tokens as a repair did."""
    repair = resident.config.repair
    if promoted and not repair.swap and not repair.per_head:
        missing = missing_rows(engine.cache, resident.slot, resident.session.length)
        wanted = expand_to_heads(torch.tensor(sorted(promoted)), missing)
        with map_store_errors():
            apply_swap(engine.cache, rows, resident, RowSwap(wanted), torch.empty(0))


def skip_untouched(
    engine: Engine, resident: ResidentSession, turns: Sequence[pb.LoggedTurn], stop: int
) -> Steps[int]:
    """Load the rows of the first turns, as far as nothing was evicted; returns their number.

    Rows from position `stop` on are not read. None can be skipped for methods that accumulate over
    every query.
    """
    config = resident.config
    if config.method.observation.accumulate:
        return 0
    most = min(stop, min(config.layer_rows) if config.method.evicts else stop)
    skipped = max((n for n in range(len(turns) + 1) if rows_after(turns[:n]) <= most), default=0)
    yield from load_rows(engine, resident, rows_after(turns[:skipped]))
    if skipped:
        resident.session.pending = pending_after(turns[skipped - 1])
    return skipped


def load_rows(
    engine: Engine,
    resident: ResidentSession,
    length: int,
    positions: Sequence[Tensor] | None = None,
) -> Steps[None]:
    """Load rows of the first `length` tokens from the store into an empty slot, the same in all heads.

    positions: per layer int64 `[m]`, ascending; all of these tokens unless given. Waits for a
    reader's thread. Raises RowsMissing and StorageFailed; then nothing has changed.
    """
    shape = engine.model.shape
    wanted = positions or [torch.arange(length)] * shape.n_layers
    selection = [each.expand(shape.n_kv_heads, -1).contiguous() for each in wanted]
    read = engine.store_io.gather(resident.session.name, selection)
    yield read
    for layer, (at, (keys, values)) in enumerate(zip(selection, read.result(), strict=True)):
        promoted = torch.zeros(at.shape, dtype=torch.bool)
        engine.cache.insert(resident.slot, layer, at.to(torch.int32), keys, values, promoted)
    resident.session.length = length


@dataclass
class ReplayRows:
    """Collects the rows of a session's `missing` pages during a replay; restores complete pages.

    `length` is the session's, in tokens.
    """

    store: RowStore
    session: str
    length: int
    missing: dict[int, Tensor | None]

    def keep(self, start: int, rows: Tensor) -> None:
        """Collect lost rows of `[n_layers, 2, n_kv_heads, t, head_dim]` from `start` on."""
        page_tokens = self.store.layout.page_tokens
        for page in range(start // page_tokens, -(-(start + rows.shape[3]) // page_tokens)):
            if page in self.missing:
                self._keep(page, start, rows)

    @property
    def layout(self) -> PageLayout:
        """Shape of a page."""
        return self.store.layout

    def summaries(self, session: str, pages: Sequence[int]) -> list[PageSummary | None]:
        """Look up no summary: the pages that are missing would not have one."""
        return [None] * len(pages)

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Read keys as the store does, incomplete pages included. Raises the store's errors."""
        stored = [page for page in pages if page not in self.missing]
        read = self.store.read_keys(session, stored)
        found = dict(zip(stored, read.keys, strict=True))
        for page in pages:
            if (rows := self.missing.get(page)) is not None:
                found[page] = rows[:, 0]
        return ReadKeys([found[page] for page in pages], read.bytes_read)

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather as the store does, incomplete pages included. Raises the store's errors."""
        page_tokens = self.store.layout.page_tokens
        kept = {page: rows for page, rows in self.missing.items() if rows is not None}
        pages = torch.tensor(sorted(kept), dtype=torch.int64)
        collected = [
            torch.isin(positions // page_tokens, pages) & (positions >= 0)
            for positions in selection
        ]
        stored = [
            positions.masked_fill(mask, -1)
            for positions, mask in zip(selection, collected, strict=True)
        ]
        gathered = self.store.gather_selection(session, stored)
        for layer, (positions, mask) in enumerate(zip(selection, collected, strict=True)):
            for head, index in mask.nonzero().tolist():
                page, offset = divmod(int(positions[head, index]), page_tokens)
                for into, rows in zip(gathered[layer], kept[page][layer], strict=True):
                    into[head, index] = rows[head, offset]
        return gathered

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather one layer, as `gather_selection`."""
        selection = [positions[:, :0]] * self.layout.n_layers
        selection[layer] = positions
        return self.gather_selection(session, selection)[layer]

    def _keep(self, page: int, start: int, rows: Tensor) -> None:
        first = page * self.store.layout.page_tokens
        end = min(first + self.store.layout.page_tokens, self.length)
        begin = max(first, start)
        stop = min(end, start + rows.shape[3])
        if begin >= stop:
            return
        kept = self.missing[page]
        if kept is None:
            kept = torch.empty(*rows.shape[:3], end - first, rows.shape[4], dtype=rows.dtype)
        kept[:, :, :, begin - first : stop - first] = rows[
            :, :, :, begin - start : stop - start
        ].cpu()
        self.missing[page] = kept
        if stop == end:
            self.store.restore(self.session, page, kept)
            del self.missing[page]
