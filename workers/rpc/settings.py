"""Settings of a worker's server."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvrecall.protocol.certificates import check_server


class ServerSettings(BaseModel):
    """Address, limits and certificates of a worker's server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field(
        default="127.0.0.1:8421", description="HOST:PORT of the worker; port 0: any free one."
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Name of the worker in the registry. Default: its address.",
    )
    advertise: str | None = Field(
        default=None,
        description="HOST:PORT at which gateways reach the worker, or `auto`: the address of the "
        "interface that reaches the catalog's Redis, with the port of `listen`. Default: its listen "
        "address.",
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
    drain_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Time that a stop waits for running calls before it cancels them.",
    )
    ops_listen: str | None = Field(
        default=None,
        description="HOST:PORT of an HTTP port for operators: /metrics, /healthz and /readyz, without "
        "authentication. Unset: none.",
    )
    token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Secret that every call must carry; the gateways' KVRECALL_WIRE__TOKEN. Off "
        "loopback a worker starts only with this or tls_client_ca.",
    )
    reflection: bool | None = Field(
        default=None, description="gRPC reflection. Unset: only on loopback."
    )
    tls_cert: Path | None = Field(
        default=None, description="The worker's certificate chain, PEM. Unset: no TLS."
    )
    tls_key: Path | None = Field(default=None, description="Its private key, PEM.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="CA certificates, PEM, that clients' must be signed by. Unset: any client.",
    )

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        check_server(self)
        return self
