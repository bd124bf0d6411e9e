"""Opening a session under an epoch restores exactly its committed rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError, StaleWriterError
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page import PageKey
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def write_first_turn(store: RowStore, session: str, rows: Tensor) -> None:
    """Open a session, append rows and flush them."""
    store.open(session, epoch=1, length=0)
    store.append(session, rows)
    assert store.flush(session)


def stored_tokens(store: RowStore, session: str) -> dict[int, int]:
    """Token count of each page of a session in the lowest tier, by index."""
    return {
        header.key.index: header.valid_tokens
        for header in store._stack.tiers.lowest.stored(session)
    }


def test_reopening_a_session_restores_the_committed_rows(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(24)
    write_first_turn(store, "a", rows)
    for epoch in (1, 1, 2, 3, 7):
        store.append("a", make_rows(20, seed=epoch))
        store.open("a", epoch=epoch, length=24, history=CommitHistory([CommitPoint(1, 24)]))
        assert torch.equal(read_all(store, "a"), rows)
        store.check()
    with pytest.raises(StaleWriterError):
        store.open("a", epoch=6, length=24)
    assert torch.equal(read_all(store, "a"), rows)


def test_rows_truncated_at_opening_are_deleted_from_the_files(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    write_first_turn(store, "a", make_rows(60))
    assert stored_tokens(store, "a") == dict.fromkeys(range(7), 8), "no file has an unfinished page"
    store.open("a", epoch=2, length=24)
    assert stored_tokens(store, "a") == {0: 8, 1: 8, 2: 8}


def test_opening_references_the_prefix_of_another_session(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    write_first_turn(store, "a", rows)
    store.open("b", epoch=1, length=0)
    store.open("b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    assert store.missing_pages("b") == []
    store.open("b", epoch=1, length=0)
    assert store.length("b") == 0
    store.append("b", rows)
    assert store.flush("b")
    store.check()


def test_pages_behind_a_missing_page_stay_readable(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    write_first_turn(store, "a", rows)
    store._stack.tiers.lowest.delete([PageKey("a", 1)])
    store.close()
    again = open_store()
    again.open("a", epoch=2, length=40)
    assert again.missing_pages("a") == [1, 3, 4], "page 3 was never finished"
    assert torch.equal(again.gather("a", torch.arange(16, 24)), rows[:, :, :, 16:24])
    with pytest.raises(MissingPageError):
        again.gather("a", torch.tensor([9]))
    with pytest.raises(MissingPageError):
        list(again.scan_keys("a"))
