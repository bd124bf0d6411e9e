"""What an operator may choose of the row store's tiers."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

if TYPE_CHECKING:
    from kvstore.format.codec import Codec

CodecName = Literal["raw", "int8"]


class StoreSettings(BaseModel):
    """Which tiers there are below memory, and how exactly each keeps finished pages.

    No tier may be less exact than the one below it: int8 in files needs int8 in Redis, if there is one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ram_codec: CodecName = "raw"
    nvme_codec: CodecName = "raw"
    redis_codec: CodecName = "raw"
    nvme_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Most bytes of the files with rows; not given: as many as the disk takes.",
    )
    nvme_reserve_bytes: int | None = Field(
        default=None,
        ge=0,
        description="What rows leave free on the files' disk, for the catalog and for clearing up; not given: 64 MiB, "
        "or an eighth of a small disk.",
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="redis://, rediss://, unix://, redis+sentinel://host:port,.../service or redis+cluster://host:port,"
        "...: the tier below the files, which is the truth then.",
    )
    redis_namespace: str = Field(
        default="kvrecall", min_length=1, description="Keeps deployments on one Redis apart."
    )
    redis_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Most bytes of all workers' rows of a model in Redis; not given: as many as Redis takes.",
    )
    summary_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Memory for pages' summaries, which order and spare a repair's reads.",
    )
    redis_ttl_seconds: float = Field(
        default=14 * 24 * 3600, gt=0, description="Of a session nobody reads or writes."
    )

    @property
    def codecs(self) -> "list[Codec]":
        """One per tier, fastest first."""
        from kvstore.format.codec import Codec  # brings torch, which a gateway has no use for

        below = [self.redis_codec] if self.redis_url else []
        return [Codec[name.upper()] for name in (self.ram_codec, self.nvme_codec, *below)]
