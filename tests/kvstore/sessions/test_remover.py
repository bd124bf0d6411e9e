"""Sessions of an earlier process are deleted unless retained; released ones can be reopened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import StaleWriterError
from kvstore.format.page import PageLayout
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


def test_only_sessions_of_an_earlier_process_are_deleted_as_unclaimed(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    for session in "abcd":
        write_first_turn(store, session, make_rows(32))
    store.close()
    again = open_store()
    again.open("d", epoch=2, length=32)
    again.open("e", epoch=1, length=0)
    assert again.unclaimed() == ["a", "b", "c"]
    assert again.unclaimed(after="a", limit=1) == ["b"]
    assert again.delete_unclaimed("b", keep_pages=2)
    assert again.delete_unclaimed("c")
    assert not any(again.delete_unclaimed(session) for session in "cde"), "opened or deleted since"
    assert again.unclaimed() == ["a"]
    stored = {
        (header.key.session, header.key.index) for header in again._stack.tiers.lowest.stored()
    }
    assert stored == {(session, index) for session in "ad" for index in range(4)} | {
        ("b", 0),
        ("b", 1),
    }
    again.check()


def test_a_released_session_can_be_reopened_from_unshared_tiers(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    store.open("a", epoch=1, length=0)
    store.append("a", rows)
    store.release("a")
    assert store.length("a") == 24, "the rows behind the last page are gone"
    store.release("a")
    assert store.unclaimed() == [], "it was not left by an earlier process"
    store.check()
    store.open("a", epoch=2, length=24)
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :24])


def test_a_released_session_leaves_no_epoch_behind(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    for number in range(5):
        write_first_turn(store, f"s{number}", make_rows(9))
        store.release(f"s{number}")
    assert not store._epochs._current
    write_first_turn(store, "held", make_rows(9))
    assert list(store._epochs._current) == ["held"]


def test_an_unloaded_session_holds_no_page_table_and_is_read_from_the_tiers(
    open_store: Callable[..., RowStore], make_rows: Callable[..., Tensor]
) -> None:
    store = open_store()
    rows = make_rows(152)
    store.open("s", epoch=3, length=0)
    store.append("s", rows[:, :, :, :150])
    assert store.flush("s")
    store.unload("s")
    assert store.length("s") == 150, "rows in memory alone keep it loaded"
    store.append("s", rows[:, :, :, 150:])
    assert store.flush("s")
    store.unload("s")
    (state,) = store._sessions.states()
    assert not state.loaded
    assert not state.behind
    assert not len(state.table)
    with pytest.raises(StaleWriterError):
        store.open("s", epoch=2, length=104)
    store.check()
    store.open("s", epoch=4, length=152)
    assert torch.equal(store.gather("s", torch.arange(152)), rows)
    store.unload("s")
    assert torch.equal(store.gather("s", torch.arange(152)), rows), "a fork reads its parent"
    with pytest.raises(StaleWriterError):
        store.open("s", epoch=3, length=152)
    store.check()
    store.delete("s")
    store.check()


def test_pages_that_no_tier_accepts_are_not_written_after_their_deletion(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any, until: Any
) -> None:
    blocked_tier.release.set()
    store = RowStore(layout, [blocked_tier])
    rows = make_rows(layout.page_tokens)
    # The page is missing; a session that shares it computes it again under its owner's name.
    shared = (SharedPages("parent", 1),)
    store.open("child", epoch=1, length=layout.page_tokens, shared=shared)
    assert store.missing_pages("child") == [0]
    blocked_tier.failing = True
    store.restore("child", 0, rows)
    store.delete("child")
    store.delete("parent")
    blocked_tier.failing = False
    until(lambda: not store._context.writer.has_refused(), "all is written")
    assert list(blocked_tier.stored()) == []
    store.close()
