"""Settings of keys, trusted proxies and rates."""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

# Within these seconds every gateway notices that a key was revoked.
REVOCATION_SECONDS = 10.0


class AccessSettings(BaseModel):
    """Settings of keys, trusted proxies and rates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pepper: SecretStr | None = Field(
        default=None,
        description="Secret that keys are stored under, of at least 16 bytes, the same on all "
        "gateways. Unset: `pepper_file`.",
    )
    pepper_file: Path | None = Field(
        default=None,
        description="File with the pepper. Unset: `key-pepper` in the data directory, made at need; "
        "gateways that share a catalog need a common one.",
    )
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = Field(
        default=(),
        description="Addresses and networks of proxies that authenticate clients: X-Kvrecall-Tenant "
        "is believed from them, without a key.",
    )
    cache_seconds: float = Field(
        default=REVOCATION_SECONDS,
        gt=0,
        le=REVOCATION_SECONDS,
        description="Time that a gateway believes what it read of a key: within it, a revocation "
        "holds.",
    )
    key_requests_per_minute: int | None = Field(
        default=None, ge=1, le=100_000, description="Requests of one key; unset: unlimited."
    )
    key_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens computed for one key, prompt and output; unset: unlimited.",
    )
    tenant_requests_per_minute: int | None = Field(
        default=None, ge=1, le=100_000, description="Requests of one tenant; unset: unlimited."
    )
    tenant_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens computed for one tenant, prompt and output; unset: unlimited.",
    )
