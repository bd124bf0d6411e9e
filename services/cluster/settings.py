"""Settings of the connection to workers in processes of their own."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvrecall.protocol.certificates import check_channel

DEFAULT_ADDRESS = "127.0.0.1:8421"


class WireSettings(BaseModel):
    """Address, certificates, message limits, and the time limit of each kind of call in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str | None = Field(
        default=None,
        description="HOST:PORT of the worker; of several workers, separated by commas. Unset: those "
        "registered in the catalog's Redis, or 127.0.0.1:8421.",
    )
    watch_seconds: float = Field(
        default=1.0, gt=0, description="Interval between two refreshes of the workers."
    )
    look_seconds: float = Field(
        default=2.0, gt=0, description="Time limit of a refresh: a worker's model, load and health."
    )
    quick_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time limit of calls that compute nothing, such as memory and stop-early.",
    )
    open_seconds: float = Field(
        default=60.0, gt=0, description="Time limit of opening a session and of deleting rows."
    )
    embed_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Time limit of embedding texts; the first call loads the encoder.",
    )
    repair_seconds: float = Field(
        default=300.0, gt=0, description="Time limit of a repair and its wait for a slot."
    )
    rebuild_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="Time limit of replays: rebuilds of lost pages, forks at earlier turns.",
    )
    turn_seconds: float = Field(
        default=3600.0, gt=0, description="Time limit of a turn and its wait for a slot."
    )
    build_seconds: float = Field(
        default=3600.0, gt=0, description="Time limit of a build of episodes."
    )
    reconnect_seconds: float = Field(
        default=2.0, gt=0, description="Longest pause between two attempts to connect."
    )
    max_message_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="Limit of a message, such as a session's state or its episodes.",
    )
    keepalive_seconds: float = Field(
        default=20.0, gt=0, description="Interval of keepalive pings on a connection."
    )
    keepalive_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time to answer a ping before the connection counts as lost.",
    )
    token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Secret that every call carries; the workers' KVRECALL_SERVER__TOKEN.",
    )
    tls_ca: Path | None = Field(
        default=None,
        description="CA certificates, PEM, that the worker's is signed by. Unset: no TLS.",
    )
    tls_cert: Path | None = Field(
        default=None, description="The gateway's certificate chain, PEM, if workers ask for it."
    )
    tls_key: Path | None = Field(default=None, description="Its private key, PEM.")

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        check_channel(self)
        return self

    @property
    def address(self) -> str:
        """The address of the worker, as it was given or by default."""
        return self.worker or DEFAULT_ADDRESS

    @property
    def workers(self) -> list[str]:
        """The addresses, one by one."""
        return [address.strip() for address in self.address.split(",") if address.strip()]

    def at(self, address: str) -> "WireSettings":
        """Settings for one of several workers."""
        return self.model_copy(update={"worker": address})
