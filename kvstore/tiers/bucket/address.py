"""Where a bucket is: its URL, and the server and region that have it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvstore.errors import TierSettingsError

_SCHEME = "s3"
_ENDPOINT_SCHEMES = ("http", "https")


@dataclass(frozen=True)
class BucketAddress:
    """Address of the objects of one deployment; its text names bucket and folder.

    Attributes:
        bucket: Name of the bucket.
        folder: What the names of all objects begin with, without slashes at its ends; may be empty.
        endpoint: URL of a server that speaks S3; None: from the environment, else AWS.
        region: Region of the bucket; None: from the environment, else us-east-1.
    """

    bucket: str
    folder: str = ""
    endpoint: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        folder = f"/{self.folder}" if self.folder else ""
        return f"{_SCHEME}://{self.bucket}{folder}"


def parse_bucket(url: str, endpoint: str | None = None, region: str | None = None) -> BucketAddress:
    """Parse `s3://bucket[/folder]`, and check the server's URL.

    Raises TierSettingsError, which does not repeat the URLs: credentials in one do not belong there.
    """
    try:
        parts = urlsplit(url)
        server = None if endpoint is None else urlsplit(endpoint)
    except ValueError:
        raise TierSettingsError(_describe("is no URL")) from None
    if "@" in parts.netloc or (server is not None and "@" in server.netloc):
        raise TierSettingsError(
            "a bucket's URL must not have credentials: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give the machine a role"
        )
    if parts.scheme != _SCHEME or not parts.netloc or parts.query or parts.fragment:
        raise TierSettingsError(_describe("cannot be read"))
    if server is not None and (server.scheme not in _ENDPOINT_SCHEMES or not server.netloc):
        raise TierSettingsError(
            "a bucket's endpoint must be the URL of a server, http://host:port or https://host"
        )
    return BucketAddress(parts.netloc, parts.path.strip("/"), endpoint, region)


def _describe(problem: str) -> str:
    return f"this URL of a bucket {problem}: expected s3://bucket or s3://bucket/folder"
