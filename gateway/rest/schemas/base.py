"""Base classes and shared types of the request and response bodies."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
JsonObject = dict[str, Any]
MetadataBody = Annotated[
    dict[Name, Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=32)
]
StopStrings = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=16)
]
# Seeds are signed 64-bit integers in the catalog.
MAX_SEED = 2**63 - 1
# Context of a body's serialisation for its fingerprint, by which a request that is sent again is known.
FINGERPRINT = "fingerprint"


class Body(BaseModel):
    """Request body: unknown fields are rejected, and values are not coerced."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class View(BaseModel):
    """Response body. `model_validate` builds one from a domain value with the same fields."""

    model_config = ConfigDict(frozen=True, from_attributes=True)
