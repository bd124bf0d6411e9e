"""Addresses of buckets."""

import pytest

from kvstore.errors import TierSettingsError
from kvstore.tiers.bucket.address import BucketAddress, parse_bucket


@pytest.mark.parametrize(
    ("url", "bucket", "folder"),
    [
        ("s3://pages", "pages", ""),
        ("s3://pages/", "pages", ""),
        ("s3://pages/a/b/", "pages", "a/b"),
    ],
)
def test_a_url_names_bucket_and_folder(url: str, bucket: str, folder: str) -> None:
    address = parse_bucket(url, "http://127.0.0.1:9000", "eu-west-1")
    assert address == BucketAddress(bucket, folder, "http://127.0.0.1:9000", "eu-west-1")
    assert str(address) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "endpoint", "why"),
    [
        ("pages", None, "expected s3://bucket"),
        ("gs://pages", None, "expected s3://bucket"),
        ("s3://", None, "expected s3://bucket"),
        ("s3://pages?versions", None, "expected s3://bucket"),
        ("s3://[pages", None, "expected s3://bucket"),
        ("s3://key:hunter2@pages", None, "must not have credentials"),
        ("s3://pages", "https://key:hunter2@minio:9000", "must not have credentials"),
        ("s3://pages", "minio:9000", "http://host:port or https://host"),
    ],
)
def test_other_urls_are_refused_without_repeating_them(
    url: str, endpoint: str | None, why: str
) -> None:
    with pytest.raises(TierSettingsError, match=why) as refused:
        parse_bucket(url, endpoint)
    assert "hunter2" not in str(refused.value)
