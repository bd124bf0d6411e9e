"""Operator settings of the row store's tiers."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

if TYPE_CHECKING:
    from kvstore.format.codec import Codec

CodecName = Literal["raw", "int8"]
COLD_AFTER_SECONDS = 7 * 24 * 3600.0
"""Seconds without use after which a page moves into a bucket, unless a store is told otherwise."""


class StoreSettings(BaseModel):
    """Tiers below memory, their limits, the codec of finished pages in each tier, and cold storage.

    No tier may be less exact than the one below it: `int8` in the files requires `int8` in Redis,
    if Redis is configured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ram_codec: CodecName = Field(
        default="raw",
        description="Codec of pages in memory: raw (exact) or int8. int8 requires int8 below.",
    )
    nvme_codec: CodecName = Field(
        default="raw",
        description="Codec of pages in files: raw (exact) or int8. int8 requires int8 in Redis, "
        "if Redis is configured.",
    )
    redis_codec: CodecName = Field(
        default="raw", description="Codec of pages in Redis: raw (exact) or int8."
    )
    nvme_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum bytes of the page files. Default: limited by the disk only.",
    )
    nvme_reserve_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that pages leave free on the disk of the page files, for the catalog "
        "and for deletions. Default: 64 MiB, or an eighth of a small disk.",
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="URL of the Redis that workers share as the lowest tier: redis://, "
        "rediss://, unix://, redis+sentinel://host:port,.../service or "
        "redis+cluster://host:port,... Default: no Redis tier.",
    )
    redis_namespace: str = Field(
        default="kvrecall",
        min_length=1,
        description="Prefix of all Redis keys. Deployments that share a Redis need different "
        "namespaces.",
    )
    redis_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum bytes of the pages of one model in Redis, over all workers. "
        "Default: 0.7 of its maxmemory, and no page while more than 0.85 of it is in use; "
        "unlimited without a maxmemory.",
    )
    redis_ttl_seconds: float = Field(
        default=14 * 24 * 3600,
        gt=0,
        description="Seconds after which an unused session's pages expire in Redis. Opening, "
        "reading or writing it, or a session that shares them, restarts the period.",
    )

    cold_url: str | None = Field(
        default=None,
        description="Bucket for the pages of sessions that sleep, s3://bucket or s3://bucket/folder, of S3 "
        "or a server that speaks it. Deployments that share a bucket need different folders. Credentials "
        "come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the machine. Needs the "
        "extra `s3`, and no KVRECALL_STORE__REDIS_URL. Default: pages stay in the files.",
    )
    cold_endpoint: str | None = Field(
        default=None,
        description="URL of the server that has the bucket, http://host:port or https://host. Default: "
        "AWS_ENDPOINT_URL, else AWS.",
    )
    cold_region: str | None = Field(
        default=None,
        min_length=1,
        description="Region of the bucket. Default: AWS_REGION, else us-east-1.",
    )
    cold_after_seconds: float = Field(
        default=COLD_AFTER_SECONDS,
        gt=0,
        description="Seconds after which a page that no session used moves from the files into the bucket. "
        "Opening, reading or writing a session restarts the period, for pages that it shares too.",
    )
    cold_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Maximum bytes of the pages of one model in the bucket, over all workers. Pages that do "
        "not fit stay in the files. Default: unlimited.",
    )

    def halve(self) -> "StoreSettings":
        """Divide the limits between two stores that have the same tiers: those of each."""
        halves = {
            name: limit // 2
            for name in ("nvme_bytes", "redis_bytes", "cold_bytes")
            if (limit := getattr(self, name)) is not None
        }
        return self.model_copy(update=halves)

    @property
    def codecs(self) -> "list[Codec]":
        """One codec per configured tier, fastest tier first."""
        # Imported here: it brings torch, which a gateway does not need.
        from kvstore.format.codec import Codec

        below = [self.redis_codec] if self.redis_url else []
        return [Codec[name.upper()] for name in (self.ram_codec, self.nvme_codec, *below)]
