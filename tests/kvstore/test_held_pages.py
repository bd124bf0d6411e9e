"""Pages that readers hold: in the RAM tier's memory where it has them, and as long as they are held."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError, RowRangeError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import append, name_pages, write

PAGES = 6


@pytest.fixture
def rows(make_rows: Callable[..., Tensor], layout: PageLayout) -> Tensor:
    """Rows of some pages."""
    return make_rows(PAGES * layout.page_tokens)


@pytest.fixture
def store(layout: PageLayout, rows: Tensor, tmp_path: Path) -> Iterator[RowStore]:
    """A store with a session of these rows."""
    store = make_store(layout, tmp_path)
    write(store, "a", rows)
    yield store
    store.close()


def make_store(
    layout: PageLayout, folder: Path, codecs: Sequence[Codec] = (Codec.RAW, Codec.RAW)
) -> RowStore:
    """A store with RAM for the pages and one more over files."""
    tiers: list[Tier] = [RamTier((PAGES + 1) * layout.page_bytes), NvmeTier(folder)]
    return RowStore(layout, tiers, codecs=codecs)


def split(rows: Tensor, layout: PageLayout) -> list[Tensor]:
    """The rows of each page."""
    return list(rows.split(layout.page_tokens, 3))


def test_all_readers_hold_the_same_memory(
    store: RowStore, layout: PageLayout, rows: Tensor
) -> None:
    held, again = (store.hold_pages("a", range(PAGES)) for _ in range(2))
    for mine, theirs, expected in zip(held, again, split(rows, layout), strict=True):
        assert torch.equal(mine, expected)
        assert mine.data_ptr() == theirs.data_ptr()


def test_pages_that_are_read_from_files_are_held_in_memory(
    layout: PageLayout, rows: Tensor, tmp_path: Path
) -> None:
    store = make_store(layout, tmp_path)
    pages = write(store, "a", rows)
    store.close()
    store = make_store(layout, tmp_path)
    store.open("a", pages)
    before = store.tiers()["ram"].counters
    held, again = (store.hold_pages("a", range(PAGES)) for _ in range(2))
    for mine, theirs, expected in zip(held, again, split(rows, layout), strict=True):
        assert torch.equal(mine, expected)
        assert mine.data_ptr() == theirs.data_ptr(), "the first reader holds the RAM tier's copy"
    after = store.tiers()["ram"].counters
    assert (after.misses - before.misses, after.hits - before.hits) == (PAGES, PAGES)
    store.close()


def test_held_pages_stay_as_they_are_while_others_take_their_place_in_memory(
    store: RowStore, layout: PageLayout, rows: Tensor, make_rows: Callable[..., Tensor]
) -> None:
    held = store.hold_pages("a", range(PAGES))
    for number in range(4):
        name = f"other-{number}"
        write(store, name, make_rows(PAGES * layout.page_tokens, seed=number + 1))
        store.hold_pages(name, range(PAGES))
    for mine, expected in zip(held, split(rows, layout), strict=True):
        assert torch.equal(mine, expected)
    store.check()


def test_a_page_has_an_id_once_its_rows_do_not_change(
    layout: PageLayout, rows: Tensor, tmp_path: Path
) -> None:
    """The last page is in memory alone while it has room; so is one whose rows are not final."""
    store = make_store(layout, tmp_path)
    cut = layout.page_tokens + 3
    append(store, "a", rows[:, :, :, :cut])
    expected = name_pages(rows, layout.page_tokens)
    assert store.page_ids("a", range(2)) == [expected[0], None]
    held = store.hold_pages("a", [1])[0]
    assert torch.equal(held[:, :, :, :3], rows[:, :, :, layout.page_tokens : cut])
    append(store, "a", rows[:, :, :, cut:])
    assert store.page_ids("a", range(PAGES)) == expected
    store.append("a", rows, final=False)
    assert store.page_ids("a", [PAGES]) == [None]
    with pytest.raises(RowRangeError):
        store.page_ids("a", [2 * PAGES])
    with pytest.raises(RowRangeError):
        store.hold_pages("a", [2 * PAGES])
    store.close()


def test_pages_that_are_encoded_are_held_as_all_readers_get_them(
    layout: PageLayout, rows: Tensor, tmp_path: Path
) -> None:
    store = make_store(layout, tmp_path, (Codec.RAW, Codec.INT8))
    write(store, "a", rows)
    read = store.gather("a", torch.arange(rows.shape[3]))
    for mine, expected in zip(
        store.hold_pages("a", range(PAGES)), split(read, layout), strict=True
    ):
        assert torch.equal(mine, expected)
    store.close()


def test_a_page_that_is_missing_cannot_be_held(store: RowStore, rows: Tensor) -> None:
    store.close_session("a")
    pages = name_pages(rows, store.layout.page_tokens)
    assert len(store.delete(pages[2:3]).result()) == 1
    store.open("a", pages)
    with pytest.raises(MissingPageError):
        store.hold_pages("a", [2])
