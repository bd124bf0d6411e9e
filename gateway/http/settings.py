"""Settings of the HTTP API: one frozen value, passed as an argument."""

from pydantic import BaseModel, ConfigDict, Field

from kvrecall.domain.addresses import is_loopback

# Names under which a browser on the same machine calls a service that listens on loopback.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class GatewaySettings(BaseModel):
    """Settings of the HTTP API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(
        default=32 << 20,
        ge=1024,
        description="Maximum size of a request body, in bytes: histories of agents have images in them.",
    )
    max_body_values: int = Field(
        default=500_000,
        ge=1000,
        description="Maximum number of values in a request body, counted as its commas and brackets: "
        "parsing holds up every other request for some 0.1 microseconds a value.",
    )
    max_body_buffer_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="Maximum size of all request bodies in memory together, in bytes. Over it, the "
        "unfinished body that has taken longest is refused.",
    )
    body_seconds: float = Field(
        default=30.0, gt=0, description="Time limit of receiving a request body, in seconds."
    )
    max_connections: int = Field(
        default=512,
        ge=1,
        description="Maximum number of connections. One more takes the place of the one that is idle "
        "for longest; where none is, probes are answered and the rest is refused.",
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
    revision: str = Field(
        default="",
        max_length=128,
        description="Revision of the source that runs, for GET /version; who builds an image knows it.",
    )
    heartbeat_seconds: float = Field(
        default=5.0,
        gt=0,
        description="Interval of comments in an event stream, or of pings in one of Anthropic's, in "
        "seconds.",
    )
    console: bool | None = Field(
        default=None,
        description="Serve the web console under /console. Unset: only where the HTTP API listens on "
        "loopback.",
    )
    console_read_only: bool = Field(
        default=False,
        description="Hide what changes sessions from the console. It protects nothing: keys and their "
        "scopes do.",
    )
    hosts: tuple[str, ...] | None = Field(
        default=None,
        description="Names, without ports, under which requests may call the service; * for any. On "
        "loopback they are added to localhost, 127.0.0.1 and ::1. Unset: elsewhere any.",
    )

    def for_listener(self, host: str) -> "GatewaySettings":
        """Return these settings with the defaults that depend on `host`, the address listened on."""
        local = is_loopback(host)
        hosts = self.hosts
        if local:
            hosts = (*LOOPBACK_NAMES, host.strip("[]"), *(hosts or ()))
        console = local if self.console is None else self.console
        return self.model_copy(update={"console": console, "hosts": hosts})
