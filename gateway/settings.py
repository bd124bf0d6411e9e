"""The limits of the front door: one frozen value, passed as an argument."""

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Everything about the front door that an operator may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(
        default=4 << 20, ge=1024, description="The largest request body, in bytes."
    )
    heartbeat_seconds: float = Field(
        default=15.0, gt=0, description="Time between comments in an event stream."
    )
