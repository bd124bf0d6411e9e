"""Migration from version 2, of kvrecall 0.2.0, to version 3: what is counted is kept as a number.

References are sorted by pages, lengths have a sum, tenants a time, and each piece of a tool's output
has a field. Each value is changed in one step and only if it has the old form, so a migration may be
interrupted, repeated, and run twice at once.
"""

import json
import re
from typing import Any

from services.catalog.redis import mapping, scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.migrations.passes import Steps
from services.catalog.redis.shared_connection import Argument, Command
from services.catalog.serialization import OUTPUT
from services.catalog.summaries import summarize_pieces


async def _migrate_refs(redis: CatalogRedis, key: str) -> int:
    unverified = f"{key.removesuffix(':sharers')}:unverified"
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_REFS, 2, key, unverified))


async def _migrate_lengths(redis: CatalogRedis, key: str) -> int:
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_LENGTHS, 1, key))


async def _migrate_tenants(redis: CatalogRedis, key: str) -> int:
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_TENANTS, 1, key))


async def _migrate_calls(redis: CatalogRedis, key: str) -> int:
    call: tuple[Argument, ...] = ("EVAL", scripts.READ_COMMANDS, 1, key, 2, "HGETALL", 1)
    _, flat = await redis.read(key, *call)
    found = 0
    for name, text in mapping.to_hash(flat).items():
        value = json.loads(text) if mapping.is_call_field(name) else {}
        if "pieces" in value:
            found += 1
            await redis.write(key, *_build_call_migration(key, name, text, value))
    return found


def _build_call_migration(key: str, name: str, text: bytes, value: dict[str, Any]) -> Command:
    """Build the script call that moves a call's pieces to fields of their own."""
    pieces = {int(index): piece for index, piece in value.pop("pieces").items()}
    value["output"] = OUTPUT.dump_python(summarize_pieces(pieces, value["delta_due"]))
    turn, position = map(int, name.split(":"))
    fields = mapping.to_piece_fields((turn, position), pieces)
    words = [word for field in fields.items() for word in field]
    new = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return ("EVAL", scripts.MIGRATE_PIECES, 1, key, name, text, new, *words)


STEPS: Steps = (
    (re.compile(r"\{[^}]*\}:sharers"), _migrate_refs),
    (re.compile(r"lengths:[^:]*"), _migrate_lengths),
    (re.compile(r"tenants"), _migrate_tenants),
    (re.compile(r"\{[^}]*\}:calls"), _migrate_calls),
)
