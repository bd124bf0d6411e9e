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
