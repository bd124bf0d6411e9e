"""Saying a session's turns again, token by token as they were logged, through the session's own method and budget.

It is how rows come back that no tier has any more, and how a session is made as it was at the end of an earlier turn.
Blocks, decoding steps and evictions fall where they fell the first time, and what the log knows of repairs comes back
again. What else moved rows does not: repairs that are no longer remembered, exchanges of rows, switches of episodes.
Rows that were computed after such a move may differ in what the active rows of then told them.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.store import RowStore
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.store_io import storage
from workers.generation import convert as wire_values
from workers.generation.prefill import prefill
from workers.generation.steps import Yielded
from workers.model.tokenizer import Segment, keep_recent
from workers.repair.promotion import RowSource, RowSwap, missing_rows, move, whole


def pending_after(turn: wire.LoggedTurn) -> list[int]:
    """The tokens at a turn's end that it said without prefilling them: its last one, and an end the model left out."""
    if not turn.output_tokens:
        return []
    closing = len(turn.token_ids) - turn.prompt_tokens - turn.output_tokens
    return list(turn.token_ids[-1 - closing :])


def rows_after(turns: Sequence[wire.LoggedTurn]) -> int:
    """How many rows a session has at the end of these turns, its first ones."""
    return sum(len(turn.token_ids) for turn in turns) - (
        len(pending_after(turns[-1])) if turns else 0
    )


def replay(
    engine: Engine,
    session: WorkerSession,
    turns: Sequence[wire.LoggedTurn],
    lost: "ReplayRows | None" = None,
) -> Generator[Yielded, Any, None]:
    """Say turns again in a seated session: all of them, and it is as it was then; or until no row is `lost`."""
    assert session.slot is not None, "the scheduler seats a session before it runs"
    session.keep_rows = None if lost is None else lost.keep
    for turn in turns:
        if lost is not None and not lost.missing:
            return
        yield from _say_again(engine, session, turn, engine.store if lost is None else lost)
        heard = [wire_values.to_chat(message) for message in turn.messages]
        session.recent = keep_recent([*session.recent, *heard])


def _say_again(
    engine: Engine, session: WorkerSession, turn: wire.LoggedTurn, rows: RowSource
) -> Generator[Yielded, Any, None]:
    """One turn as `workers.tasks.turn` runs it, but for what is chosen: the tokens are known."""
    assert session.slot is not None, "the scheduler seats a session before it runs"
    session.forget_turn()
    session.turn_start = session.length
    _promote_again(engine, session, turn.promoted, rows)
    prompt = turn.token_ids[: turn.prompt_tokens]
    said = turn.token_ids[turn.prompt_tokens : turn.prompt_tokens + max(0, turn.output_tokens - 1)]
    segments = [Segment(tuple(prompt), recorded=False)]
    yield from prefill(engine, session, segments, keep_distribution=False, prompt_said=_nothing)
    for token in said:
        engine.forward([session], torch.tensor([[token]]))
        yield None
    session.pending = pending_after(turn)
    engine.cache.clear_promoted(session.slot)
    session.promoted_rows = 0
    engine.evict(session, turn_over=True)
    session.forget_turn()


def _promote_again(
    engine: Engine, session: WorkerSession, promoted: Sequence[int], rows: RowSource
) -> None:
    """Bring tokens back as a repair did."""
    assert session.slot is not None, "the scheduler seats a session before it runs"
    if promoted and not session.repair.swap and not session.repair.per_head:
        wanted = whole(
            torch.tensor(sorted(promoted)), missing_rows(engine.cache, session.slot, session.length)
        )
        with storage():
            move(engine.cache, rows, session, RowSwap(wanted), torch.empty(0))


def skip_untouched(
    engine: Engine, session: WorkerSession, turns: Sequence[wire.LoggedTurn], stop: int
) -> int:
    """Take the rows of the first turns from the store, as far as nothing was evicted in them; how many turns that are.

    `stop`: rows from there on are not to be read. Where a method adds up what queries look at, none can be taken.
    """
    assert session.slot is not None, "the scheduler seats a session before it runs"
    if session.method.observation.accumulate:
        return 0
    most = min(stop, min(session.layer_rows) if session.method.evicts else stop)
    taken = max((n for n in range(len(turns) + 1) if rows_after(turns[:n]) <= most), default=0)
    length = rows_after(turns[:taken])
    take_rows(engine, session, length)
    if taken:
        session.pending = pending_after(turns[taken - 1])
    return taken


def take_rows(engine: Engine, session: WorkerSession, length: int) -> None:
    """Make the first rows of a seated session that has none active, in every layer and head, from the store.

    Raises RowsMissing, StorageFailed; then nothing has changed.
    """
    assert session.slot is not None, "the scheduler seats a session before it runs"
    shape = engine.model.shape
    positions = torch.arange(length).expand(shape.n_kv_heads, -1).contiguous()
    with storage():
        rows = engine.store.gather_selection(session.name, [positions] * shape.n_layers)
    unmarked = torch.zeros(positions.shape, dtype=torch.bool)
    for layer, (keys, values) in enumerate(rows):
        engine.cache.insert(session.slot, layer, positions.to(torch.int32), keys, values, unmarked)
    session.length = length


@dataclass
class ReplayRows:
    """Collects the rows of a session's `missing` pages while they are said again; a page that is whole is restored.

    `length` is the session's, in tokens.
    """

    store: RowStore
    session: str
    length: int
    missing: dict[int, Tensor | None]

    def keep(self, start: int, rows: Tensor) -> None:
        """Take what belongs to a lost page of rows `[n_layers, 2, n_kv_heads, t, head_dim]` from `start` on."""
        page_tokens = self.store.layout.page_tokens
        for page in range(start // page_tokens, -(-(start + rows.shape[3]) // page_tokens)):
            if page in self.missing:
                self._keep(page, start, rows)

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """As the store's, with the rows of pages that are not whole yet. Raises what the store raises."""
        page_tokens = self.store.layout.page_tokens
        kept = {page: rows for page, rows in self.missing.items() if rows is not None}
        pages = torch.tensor(sorted(kept), dtype=torch.int64)
        here = [
            torch.isin(positions // page_tokens, pages) & (positions >= 0)
            for positions in selection
        ]
        stored = [
            positions.masked_fill(mine, -1) for positions, mine in zip(selection, here, strict=True)
        ]
        found = self.store.gather_selection(session, stored)
        for layer, (positions, mine) in enumerate(zip(selection, here, strict=True)):
            for head, place in mine.nonzero().tolist():
                page, offset = divmod(int(positions[head, place]), page_tokens)
                for into, rows in zip(found[layer], kept[page][layer], strict=True):
                    into[head, place] = rows[head, offset]
        return found

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


def _nothing() -> None:
    """Nobody waits for the end of a replayed prompt."""
