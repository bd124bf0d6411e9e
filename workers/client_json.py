"""JSON texts of clients within the wire's messages."""

import json
from typing import Any

from workers.errors import BadSettings


def read_json(name: str, text: str) -> Any:
    """Read the value of a text. Raises BadSettings, which names it, for one that is not JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadSettings(f"{name} is not JSON: {error}") from error
