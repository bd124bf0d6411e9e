"""Pages of lists in OpenAI's form: `after` an item, `limit`, and an order."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

Json = dict[str, Any]
After = Annotated[
    str | None, Query(min_length=1, max_length=256, description="Item before the first one.")
]
Limit = Annotated[int, Query(ge=1, le=100, description="Items in one page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]


def build_page(items: Sequence[Json], limit: int) -> Json:
    """Build a page of up to `limit` items; one more of them says that there is a next page."""
    shown = list(items[:limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(items) > limit,
    }
