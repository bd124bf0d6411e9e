"""Settings of the HTTP API: one frozen value, passed as an argument."""

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Settings of the HTTP API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(
        default=4 << 20, ge=1024, description="Maximum size of a request body, in bytes."
    )
    max_body_buffer_bytes: int = Field(
        default=64 << 20,
        ge=1 << 20,
        description="Maximum size of all request bodies in memory together, in bytes. Over it, the "
        "unfinished body that has taken longest is refused.",
    )
    body_seconds: float = Field(
        default=30.0, gt=0, description="Time limit of receiving a request body, in seconds."
    )
    max_connections: int = Field(
        default=512, ge=1, description="Maximum number of connections; more are refused."
    )
    max_header_bytes: int = Field(
        default=16 << 10, ge=1024, description="Maximum size of a request's head, in bytes."
    )
    header_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Time limit of receiving a request's head, in seconds, from the connection or "
        "from its first byte on.",
    )
    keepalive_seconds: int = Field(
        default=5, ge=1, description="Time that a connection may be idle between requests."
    )
    send_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Time that a client may leave a response unread before its connection is cut.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins of web pages that may call the service, as https://app.example, or * "
        "for all. Unset: none.",
    )
    model_aliases: tuple[str, ...] = Field(
        default=(),
        description="Names under which OpenAI's API serves the model, beside its own: what clients "
        "have in their settings.",
    )
    heartbeat_seconds: float = Field(
        default=15.0, gt=0, description="Interval of comments in an event stream, in seconds."
    )
