"""A page table determines the owner of each page of a session."""

import pytest

from kvstore.errors import RowRangeError
from kvstore.format.page import PageKey
from kvstore.format.page_table import PageTable, SharedPages


def test_shared_pages_determine_the_owner_of_each_page() -> None:
    table = PageTable(
        "c", [SharedPages("s", 3), SharedPages("f", 5), SharedPages("g", 4)], [1, 2, 3, 4, 5, 6]
    )
    assert [table.key(index).session for index in range(6)] == ["s", "s", "s", "f", "f", "c"]
    assert table.own_keys() == [PageKey("c", 5)]
    assert table.owners == {"s", "f", "g", "c"}
    with pytest.raises(RowRangeError):
        table.truncate(4)


def test_a_page_keeps_the_number_under_which_it_was_stored() -> None:
    table = PageTable("c", [SharedPages("s", 2)], [1, 2, 3, 4, 5])
    table.drop(3)
    assert (len(table), table.stored_pages) == (3, 5)
    table.append(6)
    assert table.key(3) == PageKey("c", 5), "no number is used twice"
    assert [table.sequence(index) for index in range(4)] == [1, 2, 3, 6]
    assert table.version(3).key == PageKey("c", 5)
    table.drop(1)
    assert table.dropped == (range(1, 6),), "a later drop takes in earlier ones"
    table.append(7)
    assert table.key(1) == PageKey("c", 6)
    assert table.known_sequences() == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}
    removed = table.truncate(4, dropped=[range(3, 5)])
    assert removed == [PageKey("c", 6)], "as it was before the second drop"
    assert [table.sequence(index) for index in range(4)] == [1, 2, 3, 6]


def test_only_what_was_never_dropped_can_be_cut() -> None:
    table = PageTable("c", sequences=[1, 2, 3])
    table.drop(1)
    table.append(4)
    with pytest.raises(RowRangeError):
        table.truncate(0)
    assert table.truncate(1) == [PageKey("c", 3)]
