"""The tier in a bucket beyond the contract of all tiers."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvstore.errors import CorruptPageError, TierFailedError, TierSettingsError
from kvstore.format.page import PageId, PageLayout
from kvstore.fsck import check_tier
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from tests.bucket_process import BucketProcess
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]


@pytest.fixture
def tier(bucket: BucketAddress, layout: PageLayout) -> Iterator[BucketTier]:
    opened = BucketTier(bucket, layout)
    yield opened
    opened.close()


@pytest.fixture
def other(bucket: BucketAddress, layout: PageLayout) -> Iterator[BucketTier]:
    """The same bucket in another worker."""
    opened = BucketTier(bucket, layout)
    yield opened
    opened.close()


def test_names_have_folder_version_and_layout(
    tier: BucketTier, bucket: BucketAddress, bucket_server: BucketProcess, make_page: MakePage
) -> None:
    tier.put([make_page(0)])
    [name] = bucket_server.list_objects(bucket)
    folder, version, layout, page = name.split("/")
    assert (folder, version, len(layout), page) == ("kvrecall", "3", 24, make_id(0).hex())


def test_other_objects_of_the_folder_are_left_alone(
    tier: BucketTier, bucket: BucketAddress, bucket_server: BucketProcess, make_page: MakePage
) -> None:
    tier.put([make_page(0)])
    [name] = bucket_server.list_objects(bucket)
    bucket_server.write_object(bucket, name[:-4], b"notes")
    bucket_server.write_object(bucket, f"{name}/more", b"notes")
    assert [header.id for header in tier.stored()] == [make_id(0)]
    assert tier.used_bytes == len(make_page(0)[1])


def test_what_another_worker_stored_is_there_once_it_was_asked_for_or_listed(
    tier: BucketTier, other: BucketTier, make_page: MakePage
) -> None:
    tier.refresh()
    other.put([make_page(number) for number in range(3)])
    assert tier.get([make_id(0)]) == [None]
    assert tier.contains([make_id(0)]) == [True]
    assert tier.get([make_id(0)]) == [make_page(0)[1]]
    tier.refresh()
    assert tier.get(make_ids(range(3))) == [make_page(number)[1] for number in range(3)]


def test_what_another_worker_deleted_is_gone_when_it_is_read(
    tier: BucketTier, other: BucketTier, make_page: MakePage
) -> None:
    tier.put([make_page(0), make_page(1)])
    other.delete(make_ids(range(2)))
    assert tier.knows(make_id(0))
    assert tier.get([make_id(0)]) == [None]
    assert tier.look_for([make_id(1)]) == [False]
    assert (tier.knows(make_id(0)), tier.knows(make_id(1)), tier.used_bytes) == (False, False, 0)


def test_a_damaged_page_is_not_counted_until_it_is_put_again(
    tier: BucketTier, bucket: BucketAddress, bucket_server: BucketProcess, make_page: MakePage
) -> None:
    tier.put([make_page(0), make_page(1)])
    name = next(each for each in bucket_server.list_objects(bucket) if make_id(0).hex() in each)
    bucket_server.write_object(bucket, name, make_page(0)[1][:-1] + b"x")
    with pytest.raises(CorruptPageError, match="computed again"):
        tier.get([make_id(0), make_id(1)])
    assert tier.contains([make_id(0), make_id(1)]) == [False, True]
    report = check_tier(tier)
    assert (report.expires, len(report.pages)) == (False, 2)
    assert {page_id for page_id, page in report.pages.items() if page.damage} == {make_id(0)}
    tier.put([make_page(0)])
    assert tier.contains([make_id(0)]) == [True]
    assert tier.get([make_id(0)]) == [make_page(0)[1]]


def test_a_stub_of_a_page_has_no_layout(
    tier: BucketTier, bucket: BucketAddress, bucket_server: BucketProcess, make_page: MakePage
) -> None:
    tier.put([make_page(0)])
    [name] = bucket_server.list_objects(bucket)
    bucket_server.write_object(bucket, name, b"KV")
    assert [(header.id, header.page_tokens) for header in tier.stored()] == [(make_id(0), 0)]


def test_a_bucket_that_is_not_there_has_no_pages_and_takes_none(
    bucket: BucketAddress, layout: PageLayout, make_page: MakePage
) -> None:
    tier = BucketTier(replace(bucket, bucket="nowhere"), layout)
    assert tier.contains([make_id(0)]) == [False]
    assert tier.get([make_id(0)]) == [None]
    tier.delete([make_id(0)])
    for call in (lambda: tier.put([make_page(0)]), tier.refresh):
        with pytest.raises(TierFailedError, match=r"NoSuchBucket.*create it"):
            call()
    tier.close()


def test_a_server_that_is_away_fails_calls_without_the_credentials(
    bucket: BucketAddress, layout: PageLayout, make_page: MakePage
) -> None:
    tier = BucketTier(replace(bucket, endpoint="http://127.0.0.1:1"), layout)
    for call in (
        lambda: tier.put([make_page(0)]),
        lambda: tier.get([make_id(0)]),
        lambda: tier.contains([make_id(0)]),
        lambda: tier.delete([make_id(0)]),
        tier.refresh,
    ):
        with pytest.raises(TierFailedError, match=f"{bucket} failed") as failed:
            call()
        assert "hunter2" not in str(failed.value)
        assert "\n" not in str(failed.value)
    tier.close()


def test_a_tier_without_obstore_says_what_to_install(
    bucket: BucketAddress, layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(TierSettingsError, match=r"kvrecall-server\[s3\]"):
        BucketTier(bucket, layout)


def test_a_listing_tells_when_pages_were_stored(
    tier: BucketTier, other: BucketTier, make_page: MakePage
) -> None:
    began = int(time.time())
    tier.put([make_page(0, written_at=100)])
    assert tier.list_ids(101) == [make_id(0)]
    assert other.list_ids(101) == []
    assert other.list_ids(began + 3600) == [make_id(0)]
