"""Specs of sessions whose methods keep and choose rows in different ways."""

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"method": "snapkv", "budget": 60, "repair_rows": 12},
    "h2o": {"method": "h2o", "budget": 60},
    "icecache": {"method": "icecache", "budget": 90, "repair_rows": 8},
    "loopserve": {"method": "loopserve", "budget": 90, "repair_rows": 8},
}
