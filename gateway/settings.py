"""Settings of the HTTP API: one frozen value, passed as an argument."""

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Settings of the HTTP API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(
        default=4 << 20, ge=1024, description="Maximum size of a request body, in bytes."
    )
    heartbeat_seconds: float = Field(
        default=15.0, gt=0, description="Interval of comments in an event stream, in seconds."
    )
