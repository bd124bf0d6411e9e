"""Life of a worker's sessions in its row store, and in a second one for recurrent states.

A state is a page of one row there, so that sharing, epochs, durability and deletion are those of rows.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.errors import MissingPageError
from kvstore.format.commit_history import ALL_COMMITTED, CommitHistory, CommitPoint
from kvstore.format.page import PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.hierarchy.group_commit import then
from kvstore.hierarchy.metered import TierStatus
from kvstore.store import RowStore
from workers.engine.snapshots import count_stored
from workers.engine.stored.written import count_written, place_state

# Numbers of a vector that a state's bytes are laid out in.
_WIDTH = 4096


def build_state_layout(state_bytes: int, fingerprint: str) -> PageLayout:
    """Build the layout of a store of recurrent states of so many bytes each."""
    numbers = -(-state_bytes // torch.float32.itemsize)
    width = min(numbers, _WIDTH)
    return PageLayout(
        n_layers=-(-numbers // width),
        n_kv_heads=1,
        head_dim=width,
        dtype=torch.float32,
        fingerprint=f"{fingerprint} states",
        page_tokens=1,
        latent=True,
    )


class StoredSessions:
    """The stored sessions of one worker.

    Attributes:
        rows: The store of their rows.
        states: The store of their recurrent states; None for a model without.
    """

    def __init__(self, rows: RowStore, states: RowStore | None = None) -> None:
        """Serve sessions over one store or two."""
        self.rows = rows
        self.states = states
        self._page_tokens = rows.layout.page_tokens

    def open(
        self,
        spec: pb.SessionSpec,
        length: int,
        snapshots: Sequence[int],
        dropped: Sequence[range] = (),
    ) -> None:
        """Open a session with `length` rows and its states. Raises as `RowStore.open`."""
        self.open_shared(
            spec.session,
            spec.epoch,
            length,
            read_shared(spec.shared),
            snapshots,
            read_history(spec.history),
            dropped,
        )

    def open_shared(
        self,
        session: str,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages],
        snapshots: Sequence[int],
        history: CommitHistory | None = None,
        dropped: Sequence[range] = (),
    ) -> None:
        """Open a session over other sessions' pages and states. Raises as `RowStore.open`."""
        self.rows.open(
            session, epoch=epoch, length=length, shared=shared, history=history, dropped=dropped
        )
        if self.states is not None:
            written = count_written(length, dropped, self._page_tokens)
            self._open_states(session, epoch, written, shared, snapshots, history)

    def fork(
        self,
        parent: str,
        spec: pb.SessionSpec,
        length: int,
        snapshots: Sequence[int],
        dropped: Sequence[range] = (),
    ) -> None:
        """Open a session over the first `length` rows of its parent. Raises as `RowStore.fork`."""
        shared = read_shared(spec.shared)
        self.rows.fork(
            parent, spec.session, epoch=spec.epoch, length=length, shared=shared, dropped=dropped
        )
        if self.states is not None:
            written = count_written(length, dropped, self._page_tokens)
            self._open_states(spec.session, spec.epoch, written, shared, snapshots, None)

    def find_intact(
        self, session: str, snapshots: Sequence[int], *, verify: bool = False
    ) -> tuple[int, ...]:
        """Find the positions of the states that are not known to be lost; `verify`: by reading them.

        What `verify` reads it repairs. Raises as `RowStore.repair_pages`.
        """
        if self.states is None:
            return ()
        find_missing = self.states.repair_pages if verify else self.states.missing_pages
        missing = set(find_missing(session))
        return tuple(at for index, at in enumerate(snapshots) if at and index not in missing)

    def find_state(
        self, length: int, snapshots: Sequence[int], dropped: Sequence[range] = ()
    ) -> int | None:
        """Find the index of the state after `length` tokens."""
        place = place_state(length, dropped, self._page_tokens)
        return list(snapshots).index(place) if place and place in snapshots else None

    def read_state(
        self,
        session: str,
        length: int,
        snapshots: Sequence[int],
        nbytes: int,
        dropped: Sequence[range] = (),
    ) -> Tensor:
        """Read the state after `length` tokens, uint8 `[nbytes]`. Raises as `RowStore.gather`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        index = self.find_state(length, snapshots, dropped)
        if index is None:
            raise MissingPageError(
                f"session {session!r} has no recurrent state after {length} tokens; it must be "
                "computed again"
            )
        rows = self.states.gather(session, torch.tensor([index]))
        return rows.flatten().view(torch.uint8)[:nbytes]

    def append_state(self, session: str, packed: Tensor) -> None:
        """Append a state, uint8 `[nbytes]`. Raises as `RowStore.append`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.append(session, self._lay_out(packed))

    def restore_state(self, session: str, index: int, packed: Tensor) -> None:
        """Write a lost state again. Raises as `RowStore.restore`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.restore(session, index, self._lay_out(packed))

    def drop_state(self, session: str, index: int) -> None:
        """Delete one of a session's own states."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.drop_page(session, index)

    def begin_flush(self, session: str) -> "Future[bool]":
        """Begin to make rows and states durable, as `RowStore.begin_flush`."""
        if self.states is None:
            return self.rows.begin_flush(session)
        states = self.states.begin_flush(session)
        return then(self.rows.begin_flush(session), lambda durable: states.result() and durable)

    def begin_delete(self, session: str, keep_pages: int = 0) -> "Future[None]":
        """Begin to delete a session, but for pages that others share and all states with them."""
        rows = self.rows.begin_delete(session, keep_pages=keep_pages)
        if self.states is None or keep_pages:
            return rows
        states = self.states.begin_delete(session)
        return then(rows, lambda _: states.result())

    def delete(self, session: str, *, keep_pages: int, fence: int) -> None:
        """Delete a session as `begin_delete`, and refuse later writes before `fence`."""
        if self.states is not None and not keep_pages:
            self.states.delete(session, fence=fence)
        self.rows.delete(session, keep_pages=keep_pages, fence=fence)

    def unclaimed(self, after: str, limit: int | None) -> list[str]:
        """Sessions of an earlier process, as `RowStore.unclaimed`."""
        found = set(self.rows.unclaimed(after, limit))
        if self.states is not None:
            found |= set(self.states.unclaimed(after, limit))
        return sorted(found)[:limit]

    def delete_unclaimed(self, session: str, *, keep_pages: int = 0) -> bool:
        """Delete a session of an earlier process, as `RowStore.delete_unclaimed`."""
        deleted = False
        if self.states is not None and not keep_pages:
            deleted = self.states.delete_unclaimed(session)
        return self.rows.delete_unclaimed(session, keep_pages=keep_pages) or deleted

    def release(self, session: str) -> None:
        """Remove a session that continues in another process from memory."""
        for store in self._stores():
            store.release(session)

    def unload(self, session: str) -> None:
        """Forget what memory has of an idle session."""
        for store in self._stores():
            store.unload(session)

    def tiers(self) -> dict[str, TierStatus]:
        """Contents and activity of each tier by its name; those of states begin with `states-`."""
        states = {} if self.states is None else self.states.tiers()
        return self.rows.tiers() | {f"states-{name}": tier for name, tier in states.items()}

    def count_pending(self) -> tuple[int, int]:
        """Count pages and states that are not in the lowest tier, and those in memory alone."""
        counts = [store.count_pending() for store in self._stores()]
        return sum(pending for pending, _ in counts), sum(undurable for _, undurable in counts)

    def close(self) -> None:
        """Close both stores. Raises as `RowStore.close`, once both are closed."""
        try:
            if self.states is not None:
                self.states.close()
        finally:
            self.rows.close()

    def _open_states(
        self,
        session: str,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages],
        snapshots: Sequence[int],
        history: CommitHistory | None,
    ) -> None:
        """Open the session's states as `open_shared` opens its rows: in states where it has tokens.

        length: of the rows that were written, dropped ones included.
        """
        assert self.states is not None, "only models with recurrent states have them stored"

        def count(tokens: int) -> int:
            return count_stored(snapshots, tokens)

        def convert(points: CommitHistory) -> CommitHistory:
            if points is ALL_COMMITTED:
                return points
            return CommitHistory([CommitPoint(p.epoch, count(p.length)) for p in points.points])

        self.states.open(
            session,
            epoch=epoch,
            length=count(length),
            shared=[
                SharedPages(each.owner, states, convert(each.history))
                for each in shared
                if (states := count(each.pages * self._page_tokens))
            ],
            history=None if history is None else convert(history),
        )

    def _lay_out(self, packed: Tensor) -> Tensor:
        """Lay bytes out as the one row of a page."""
        assert self.states is not None, "only models with recurrent states have them stored"
        layout = self.states.layout
        shape = layout.rows_shape(1)
        missing = layout.row_bytes - packed.numel()
        return pad(packed, (0, missing)).view(torch.float32).view(shape)

    def _stores(self) -> Iterable[RowStore]:
        return (self.rows,) if self.states is None else (self.rows, self.states)


def read_shared(shared: Iterable[pb.SharedPages]) -> list[SharedPages]:
    """Convert references to other sessions' pages from the wire to the row store's form."""
    return [
        SharedPages(each.owner, each.pages, read_history(each.history) or ALL_COMMITTED)
        for each in shared
    ]


def read_history(points: Iterable[pb.CommitPoint]) -> CommitHistory | None:
    """Convert a commit history to the row store's form; None without points."""
    history = CommitHistory([CommitPoint(point.epoch, point.length) for point in points])
    return history if history.points else None
