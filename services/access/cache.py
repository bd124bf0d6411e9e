"""What was read of keys, for a few seconds, with a bound on entries and on reads at once."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvrecall.domain.errors import CatalogError
from services.catalog.api_keys import KeyRecord
from services.catalog.waiting import ask_catalog

# Entries of known and, apart, of unknown ids: a flood of guesses displaces no key in use.
_ENTRIES = 10_000
_READS_AT_ONCE = 16


@dataclass(frozen=True)
class _Entry:
    """A key, or None for an unknown id, believed until a monotonic time."""

    record: KeyRecord | None
    until: float


class KeyCache:
    """Keys by id, each read from the catalog again after `seconds`.

    An entry's time begins before its read, so that a revocation is noticed within `seconds` of it.
    Requests with one id share a read; a bounded number of reads runs at once, first come, first
    served.
    """

    def __init__(self, read: Callable[[str], Awaitable[KeyRecord | None]], seconds: float) -> None:
        self._read = read
        self._seconds = seconds
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self._reading: dict[str, asyncio.Task[_Entry]] = {}
        self._slots = asyncio.Semaphore(_READS_AT_ONCE)

    async def get(self, key_id: str, patience: float | None = None) -> KeyRecord | None:
        """Return a key, None if there is none of that id. Raises CatalogError.

        With `patience` what was read last counts where the catalog does not answer within these
        seconds.
        """
        entry = self._known.get(key_id) or self._unknown.get(key_id)
        if entry is None or entry.until <= time.monotonic():
            try:
                entry = await ask_catalog(self._get_read(key_id), patience)
            except CatalogError:
                if patience is None or entry is None:
                    raise
        return entry.record

    async def _get_read(self, key_id: str) -> _Entry:
        task = self._reading.get(key_id)
        if task is None:
            task = asyncio.create_task(self._load(key_id), name="key read")
            self._reading[key_id] = task
            task.add_done_callback(lambda done: self._end_read(key_id, done))
        # Shielded: others may wait for it too. Its error is theirs, so each raises it.
        return await asyncio.shield(task)

    def _end_read(self, key_id: str, done: "asyncio.Task[_Entry]") -> None:
        self._reading.pop(key_id, None)
        if not done.cancelled():
            done.exception()  # seen here: asyncio logs it where no caller waits

    async def _load(self, key_id: str) -> _Entry:
        async with self._slots:
            started = time.monotonic()
            record = await self._read(key_id)
        entry = _Entry(record, started + self._seconds)
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        entries = self._unknown if record is None else self._known
        entries[key_id] = entry
        if len(entries) > _ENTRIES:
            entries.popitem(last=False)
        return entry
