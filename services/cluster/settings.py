"""What an operator decides for the way to a worker that is a process of its own."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WireSettings(BaseModel):
    """Address, certificates, limits, and the longest that each kind of call may take, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str = Field(
        default="127.0.0.1:8421",
        description="HOST:PORT of the worker; of several, with commas in between.",
    )
    watch_seconds: float = Field(
        default=1.0, gt=0, description="Between two looks at which workers there are."
    )
    look_seconds: float = Field(
        default=2.0, gt=0, description="A worker that is looked at answers within this time."
    )
    connect_seconds: float = Field(
        default=120.0, gt=0, description="How long a start waits for the worker."
    )
    quick_seconds: float = Field(
        default=10.0, gt=0, description="Calls that compute nothing: stats, memory, hurry."
    )
    open_seconds: float = Field(default=60.0, gt=0, description="Opening a session, dropping rows.")
    embed_seconds: float = Field(
        default=60.0, gt=0, description="Embedding texts; the first call loads the encoder."
    )
    repair_seconds: float = Field(
        default=300.0, gt=0, description="A repair, and its wait for a slot."
    )
    rebuild_seconds: float = Field(
        default=3600.0, gt=0, description="Saying turns again: lost pages, forks of old."
    )
    turn_seconds: float = Field(
        default=3600.0, gt=0, description="A turn, and its wait for a slot."
    )
    build_seconds: float = Field(default=3600.0, gt=0, description="A build of episodes.")
    reconnect_seconds: float = Field(
        default=2.0, gt=0, description="The longest pause between two connections."
    )
    max_message_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="The largest message: the state of a session, or its episodes.",
    )
    keepalive_seconds: float = Field(
        default=20.0, gt=0, description="Between two signs of life on a connection."
    )
    keepalive_timeout_seconds: float = Field(
        default=10.0, gt=0, description="Without an answer to one: it is gone."
    )
    tls_ca: Path | None = Field(
        default=None,
        description="Certificates, PEM, of which one has signed the worker's. Unset: no TLS.",
    )
    tls_cert: Path | None = Field(
        default=None, description="This side's certificate chain, PEM, if workers ask for it."
    )
    tls_key: Path | None = Field(default=None, description="Its private key, PEM.")

    @model_validator(mode="after")
    def _certificates_are_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert and tls_key need tls_ca")
        return self

    @property
    def workers(self) -> list[str]:
        """The addresses, one by one."""
        return [address.strip() for address in self.worker.split(",") if address.strip()]

    def at(self, address: str) -> "WireSettings":
        """The way to one of several workers, which is looked for again if it is not there at once."""
        return self.model_copy(update={"worker": address, "connect_seconds": self.look_seconds})
