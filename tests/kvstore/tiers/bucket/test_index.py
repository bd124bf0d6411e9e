"""The index of a bucket."""

import pytest

from kvstore.tiers.bucket.index import BucketIndex
from tests.kvstore.page_ids import make_id, make_ids


def test_a_listing_replaces_what_the_index_has() -> None:
    index = BucketIndex()
    index.add(make_id(0), 100, 50)
    index.add(make_id(1), 100, 50)
    with index.listing() as found:
        found[make_id(1)] = (100, 70)
        found[make_id(2)] = (300, 70)
    assert [index.has(page_id) for page_id in make_ids(range(3))] == [False, True, True]
    assert index.is_listed
    assert index.used_bytes == 400
    # The time of writing of a page that this process knew is older than that of storing it.
    assert index.list_ids(60) == [make_id(1)]
    index.check()


def test_what_changes_during_a_listing_stays() -> None:
    index = BucketIndex()
    index.add(make_id(0), 100, 50)
    with index.listing() as found:
        found[make_id(0)] = (100, 50)
        index.remove([make_id(0)])
        index.add(make_id(1), 200, 50)
    assert [index.has(page_id) for page_id in make_ids(range(2))] == [False, True]
    assert index.used_bytes == 200


def test_a_listing_that_fails_changes_nothing() -> None:
    index = BucketIndex()
    index.add(make_id(0), 100, 50)
    with pytest.raises(OSError, match="silent"), index.listing():
        raise OSError("silent")
    assert index.has(make_id(0))
    assert not index.is_listed


def test_a_damaged_page_is_there_and_not_intact_until_it_is_added_again() -> None:
    index = BucketIndex()
    index.add(make_id(0), 100, 50)
    index.mark_damaged(make_id(0))
    assert (index.has(make_id(0)), index.get_size(make_id(0))) == (False, 100)
    with index.listing() as found:
        found[make_id(0)] = (100, 50)
    assert not index.has(make_id(0))
    index.add(make_id(0), 100, 50)
    assert index.has(make_id(0))
