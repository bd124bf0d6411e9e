"""Migration from version 1, of kvrecall 0.1.0, to version 2: the standard terms.

Each value is read, renamed here and written back only if it is still the value that was read. A
value that has the new names already is left alone, so a migration may be interrupted, repeated, and
even run twice at once.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from services.catalog import renames
from services.catalog.redis import mapping, scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.migrations.passes import Steps
from services.catalog.redis.shared_connection import Argument

# The number of list entries that are read and written at once.
_ENTRIES_AT_ONCE = 64
_OLD_INLINE = re.compile(r"(\d+):said:(.*)", re.DOTALL)
_OLD_ORPHANED = "leftovers"


async def _migrate_turns(redis: CatalogRedis, key: str) -> int:
    return await _migrate_list(redis, key, renames.rename_in_turn)


async def _migrate_repairs(redis: CatalogRedis, key: str) -> int:
    return await _migrate_list(redis, key, renames.rename_in_repair_record)


async def _migrate_list(redis: CatalogRedis, key: str, change: renames.Change) -> int:
    found = 0
    async for first, entries in _read_list(redis, key):
        words: list[Argument] = []
        for index, entry in enumerate(entries, first):
            renamed = _rename(entry, change)
            if renamed is not None:
                words += [index, entry, renamed]
        if words:
            found += len(words) // 3
            await redis.write(key, "EVAL", scripts.MIGRATE_ENTRIES, 1, key, *words)
    return found


async def _read_list(redis: CatalogRedis, key: str) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
    first = 0
    while entries := await redis.read(key, "LRANGE", key, first, first + _ENTRIES_AT_ONCE - 1):
        yield first, entries
        first += len(entries)


async def _migrate_calls(redis: CatalogRedis, key: str) -> int:
    words: list[Argument] = []
    for name, value in mapping.to_hash(await _read_hash(redis, key)).items():
        inline = _OLD_INLINE.fullmatch(name)
        if inline is not None:
            words += [name, value, f"{inline[1]}:inline:{inline[2]}", value]
        elif mapping.is_call_field(name):
            renamed = _rename(value, renames.rename_in_call)
            if renamed is not None:
                words += [name, value, name, renamed]
    return await _write_fields(redis, key, words)


async def _migrate_tombstone(redis: CatalogRedis, key: str) -> int:
    kept = await redis.read(key, "HGET", key, "kept")
    words = [] if kept is None else ["kept", kept, "retained", kept]
    return await _write_fields(redis, key, words)


async def _read_hash(redis: CatalogRedis, key: str) -> Sequence[bytes]:
    """Read a hash as names and values in turn."""
    call = ("EVAL", scripts.READ_COMMANDS, 1, key, 2, "HGETALL", 1)
    _, fields = await redis.read(key, *call)
    return list(fields)


async def _write_fields(redis: CatalogRedis, key: str, words: Sequence[Argument]) -> int:
    if words:
        await redis.write(key, "EVAL", scripts.MIGRATE_FIELDS, 1, key, *words)
    return len(words) // 4


async def _migrate_record(redis: CatalogRedis, key: str) -> int:
    text: bytes | None = await redis.read(key, "GET", key)
    if text is None:
        return 0  # expired meanwhile
    created, fingerprint, response = json.loads(text)
    renamed = _rename(response, renames.rename_in_response)
    if renamed is None:
        return 0
    record = json.dumps([created, fingerprint, renamed])
    await redis.write(key, "EVAL", scripts.MIGRATE_VALUE, 1, key, text, record)
    return 1


async def _move_orphaned(redis: CatalogRedis, key: str) -> int:
    """Move the set of owners with orphaned pages to its new name, which may be in another slot."""
    orphaned = f"{key.removesuffix(_OLD_ORPHANED)}orphaned"
    owners = await redis.read(key, "SMEMBERS", key)
    if owners:
        await redis.write(orphaned, "SADD", orphaned, *owners)
        await redis.write(key, "SREM", key, *owners)
    return len(owners)


def _rename(text: str | bytes, change: renames.Change) -> str | None:
    """Return a JSON object's text with new names, None if it has them already."""
    value: Any = json.loads(text)
    renamed = change(value)
    if renamed == value:
        return None
    return json.dumps(renamed, ensure_ascii=False, separators=(",", ":"))


STEPS: Steps = (
    (re.compile(r"\{[^}]*\}:turns"), _migrate_turns),
    (re.compile(r"\{[^}]*\}:calls"), _migrate_calls),
    (re.compile(r"\{[^}]*\}:repairs"), _migrate_repairs),
    (re.compile(r"\{[^}]*\}:gone"), _migrate_tombstone),
    (re.compile(r"(\{[^}]*\}:)?answer:[0-9a-f]{40}"), _migrate_record),
    (re.compile(_OLD_ORPHANED), _move_orphaned),
)
