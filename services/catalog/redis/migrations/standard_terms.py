"""Migration from version 1, of kvrecall 0.1.0, to version 2: the standard terms.

Each value is read, renamed here and written back only if it is still the value that was read. A
value that has the new names already is left alone, so a migration may be interrupted, repeated, and
even run twice at once.
"""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from services.catalog import renames
from services.catalog.redis import mapping, scripts
from services.catalog.redis.client import Argument, CatalogRedis
from services.catalog.redis.keys import Keys

KeepLock = Callable[[], Awaitable[None]]
Step = Callable[[CatalogRedis, str], Awaitable[int]]

# The number of list entries that are read and written at once.
_ENTRIES_AT_ONCE = 64
_SESSION_KEY = re.compile(r"\{[^}]*\}:(turns|calls|repairs|gone)")
_RECORD_KEY = re.compile(r"(\{[^}]*\}:)?answer:[0-9a-f]{40}")
_OLD_INLINE = re.compile(r"(\d+):said:(.*)", re.DOTALL)
_OLD_ORPHANED = "leftovers"


async def migrate(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> None:
    """Migrate all keys of the namespace, until a whole pass finds nothing to change.

    Keys may move between the servers of a cluster during a pass. Raises CatalogError.
    """
    while await _run_pass(redis, keys, keep_lock):
        pass


async def _run_pass(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> int:
    """Migrate each key once; return the number of values that were found with old names."""
    found = await _move_orphaned(redis, keys)
    prefix = f"{keys.namespace}:"
    async for key in redis.scan(prefix):
        step = _get_step(key.removeprefix(prefix))
        if step is not None:
            await keep_lock()
            found += await step(redis, key)
    return found


def _get_step(name: str) -> Step | None:
    session_key = _SESSION_KEY.fullmatch(name)
    if session_key is not None:
        return _STEPS[session_key[1]]
    return _migrate_record if _RECORD_KEY.fullmatch(name) else None


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


async def _move_orphaned(redis: CatalogRedis, keys: Keys) -> int:
    """Move the set of owners with orphaned pages to its new name, which may be in another slot."""
    old = f"{keys.namespace}:{_OLD_ORPHANED}"
    owners = await redis.read(old, "SMEMBERS", old)
    if owners:
        await redis.write(keys.orphaned, "SADD", keys.orphaned, *owners)
        await redis.write(old, "SREM", old, *owners)
    return len(owners)


def _rename(text: str | bytes, change: renames.Change) -> str | None:
    """Return a JSON object's text with new names, None if it has them already."""
    value: Any = json.loads(text)
    renamed = change(value)
    if renamed == value:
        return None
    return json.dumps(renamed, ensure_ascii=False, separators=(",", ":"))


_STEPS: dict[str, Step] = {
    "turns": _migrate_turns,
    "calls": _migrate_calls,
    "repairs": _migrate_repairs,
    "gone": _migrate_tombstone,
}
