"""Settings of the gRPC API; the limits of requests are those of the HTTP API."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrecall.protocol.certificates import check_server


class GrpcSettings(BaseModel):
    """Address, certificates, limits and keepalive of the gRPC API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str | None = Field(
        default=None,
        pattern=r"^.+:[0-9]{1,5}$",
        description="HOST:PORT of the gRPC API; port 0: any free one. Unset: no gRPC.",
    )
    tls_cert: Path | None = Field(
        default=None, description="Certificate chain of the gRPC API, PEM. Unset: no TLS."
    )
    tls_key: Path | None = Field(default=None, description="Its private key, PEM.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="CA certificates, PEM, that clients' must be signed by. Unset: any client.",
    )
    reflection: bool = Field(
        default=True, description="gRPC reflection, by which tools list the calls."
    )
    max_calls: int = Field(
        default=512, ge=1, description="Maximum number of concurrent calls; more are refused."
    )
    max_streams: int = Field(
        default=128, ge=1, description="Maximum number of concurrent calls on one connection."
    )
    keepalive_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Interval of pings on a connection; clients may ping every tenth of it.",
    )
    keepalive_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time to answer a ping before the connection counts as lost, which cancels "
        "its turns.",
    )

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        check_server(self)
        return self
