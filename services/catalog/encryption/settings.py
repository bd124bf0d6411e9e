"""Settings of encryption at rest."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class EncryptionSettings(BaseModel):
    """Settings of encryption at rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys_file: Path | None = Field(
        default=None,
        description="File with the operator's keys, a line each: a name and 32 bytes in base64, as "
        "`kvrecall encryption new-key` prints it. The first one is in use, the others open what they "
        "wrapped. The same on all gateways. Unset: nothing is encrypted.",
    )
