"""A session goes on behind its first rows, and what it dropped stays for those that share it."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore

COMMITTED = CommitHistory([CommitPoint(1, 1 << 20)])


def read(store: RowStore, session: str, length: int) -> Tensor:
    """All rows of a session."""
    return store.gather(session, torch.arange(length))


def write_and_drop(store: RowStore, make_rows: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Write four pages, drop all but the first, and write two more; returns the rows of both."""
    before, after = make_rows(32, 1), make_rows(16, 2)
    store.open("s", epoch=1, length=0)
    store.append("s", before)
    store.drop("s", 8)
    store.append("s", after)
    store.flush("s")
    return before, after


def test_what_was_dropped_is_read_by_forks_and_by_the_session_as_it_was(
    open_store: Callable[..., RowStore], make_rows: Callable[..., Tensor]
) -> None:
    store = open_store()
    before, after = write_and_drop(store, make_rows)
    expected = torch.cat([before[:, :, :, :8], after], 3)
    assert torch.equal(read(store, "s", 24), expected)
    store.fork("s", "then", epoch=1, length=32, shared=[SharedPages("s", 4)])
    assert torch.equal(read(store, "then", 32), before)
    gap = [range(1, 4)]
    store.fork("s", "now", epoch=1, length=24, shared=[SharedPages("s", 6)], dropped=gap)
    assert torch.equal(read(store, "now", 24), expected)
    store.open("s", epoch=2, length=32, history=COMMITTED)
    assert torch.equal(read(store, "s", 32), before), "a drop that was not committed"
    store.check()


def test_an_earlier_process_left_all_of_it(
    open_store: Callable[..., RowStore], make_rows: Callable[..., Tensor]
) -> None:
    store = open_store()
    before, after = write_and_drop(store, make_rows)
    store.close()
    again = open_store()
    again.open("s", epoch=2, length=24, history=COMMITTED, dropped=[range(1, 4)])
    assert torch.equal(read(again, "s", 24), torch.cat([before[:, :, :, :8], after], 3))
    shared = [SharedPages("s", 4)]
    again.open("then", epoch=1, length=32, shared=shared)
    assert torch.equal(read(again, "then", 32), before)
    again.check()
