"""Bytes of the pages in Redis: a cached sum, kept up to date by a thread of its own.

The sum of all workers is one key. Each worker adds the pages that it stored to it every few seconds and
takes over the result, so a reading costs nothing however many pages there are. Pages that are condemned no
longer count. That others expire is unseen. So one worker counts all pages from time to time, and soon after
a start, a failure, a call that was sent again or a full tier, and sets the sum.

Exact is what one worker alone has stored and deleted since a count. The sum of several is too small by what
others have not published yet, for good if they are killed before; too large by what has expired since the
last count; and off, until the next one, by what was stored while a count ran, and by condemned pages that
were saved.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

from redis import Redis

from kvstore.errors import KvStoreError, TierFullError
from kvstore.tiers.redis.client import RedisServer, scan_names
from kvstore.tiers.redis.keys import RedisKeys
from kvstore.tiers.redis.zero_copy import Command, run_batch

PAGES_SHARE = 0.7
"""Default limit of the pages, as a share of Redis' `maxmemory`."""
MEMORY_SHARE = 0.85
"""Share of `maxmemory` in use, by whatever data, from which pages are refused by default."""

_PUBLISH_SECONDS = 5.0
_PROBE_SECONDS = 0.5
_COUNT_SECONDS = 600.0
# A sum that is in doubt is counted again once the last count is this old.
_RECOUNT_SECONDS = 60.0
_SIZES = 1000

_MEMORY_FIELD = re.compile(rb"^(used_memory|maxmemory):(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class ServerMemory:
    """Memory of one server in bytes: in use, and its `maxmemory` (0: no limit)."""

    used: int
    limit: int


class SharedUsage:
    """Cached sum of the bytes of all pages, the limit for it, and the thread behind both.

    The thread also probes a server that does not answer, so that no call waits for it meanwhile.
    A page that expires within `condemned_milliseconds` does not count. `limit_bytes` is the operator's limit;
    None derives one from the servers' `maxmemory`.
    """

    def __init__(
        self,
        server: RedisServer,
        keys: RedisKeys,
        ttl_milliseconds: int,
        condemned_milliseconds: int,
        limit_bytes: int | None,
    ) -> None:
        self._server = server
        self._keys = keys
        self._ttl_milliseconds = ttl_milliseconds
        self._condemned_milliseconds = condemned_milliseconds
        self._explicit_limit = limit_bytes
        self._published = 0
        self._changed = 0
        self._memory: list[ServerMemory] = []
        self._lock = Lock()
        self._refresh_wanted = Event()
        # The monotonic time since which the sum may be wrong by more than what is unpublished.
        self._doubted_at: float | None = None
        self._repeated_calls = 0
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvstore-redis-usage", daemon=True)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all workers: this one's as of now, the others' as last published."""
        return max(0, self._published + self._changed)

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes of pages; None while neither the operator nor a server sets one."""
        if self._explicit_limit is not None:
            return self._explicit_limit
        limits = [memory.limit for memory in self._memory]
        return int(PAGES_SHARE * sum(limits)) if limits and all(limits) else None

    def start(self) -> None:
        """Read the sum, or count if there is none, and start the thread. Raises a tier's error."""
        self.refresh()
        self._doubt()  # a worker that was killed before may not have published what it stored
        self._thread.start()

    def add(self, amount: int) -> None:
        """Add the bytes of pages that this worker stored, or take off those that it condemned."""
        with self._lock:
            self._changed += amount

    def require_room(self, needed: int) -> None:
        """Raise TierFullError unless `needed` bytes fit, as of the last refresh."""
        shortage = self._describe_shortage(needed) if needed else None
        if shortage is None:
            return
        self._doubt()  # expired pages may have made room
        self._refresh_wanted.set()
        raise TierFullError(
            f"{self._server}: {needed} bytes do not fit, {shortage}; raise its limit or delete "
            "sessions"
        )

    def refresh(self) -> None:
        """Publish what this worker stored, and read the sum and the servers' memory.

        Counts all pages when no sum is there or the last count is old. Raises a tier's error.
        """
        if self._explicit_limit is None:
            self._memory = self._server.run_on_all(_read_memory)
        published = self._execute("GET", self._keys.used)
        if self._is_count_due() or published is None:
            self.count()
            return
        changed = self._changed
        total = self._execute("INCRBY", self._keys.used, changed) if changed else published
        self._take_over(int(total), changed)

    def count(self) -> int:
        """Sum the bytes of all pages, set the sum to that and return it. Raises a tier's error."""
        started = time.monotonic()
        changed = self._changed
        total = sum(self._server.run_on_all(self._sum_sizes))
        self._take_over(total, changed)
        with suppress(TierFullError):  # a server without memory refuses this as well
            self._execute("SET", self._keys.used, total, "PX", self._ttl_milliseconds)
        if self._doubted_at is not None and self._doubted_at <= started:
            self._doubted_at = None
        return total

    def list_size_commands(self, names: Sequence[str]) -> list[Command]:
        """List the commands whose replies `read_sizes` reads."""
        return [(command, name) for name in names for command in ("STRLEN", "PTTL")]

    def read_sizes(self, replies: Sequence[int]) -> list[int]:
        """Read how many bytes each page counts: none if it is not there, or condemned."""
        pairs = zip(replies[::2], replies[1::2], strict=True)
        return [size if left > self._condemned_milliseconds else 0 for size, left in pairs]

    def close(self) -> None:
        """Publish the last changes and stop the thread. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._refresh_wanted.set()
        if self._thread.is_alive():
            self._thread.join()
            if self._changed:
                with suppress(KvStoreError):
                    self.refresh()

    def _run(self) -> None:
        refreshed_at = time.monotonic()
        while not self._closing.is_set():
            self._refresh_wanted.wait(_PROBE_SECONDS)
            wanted = self._refresh_wanted.is_set()
            self._refresh_wanted.clear()
            if self._server.failure is not None:
                if not self._server.probe():
                    continue
                self._doubt()  # calls without a reply may have stored pages
            if self._server.repeated_calls != self._repeated_calls:
                self._repeated_calls = self._server.repeated_calls
                self._doubt()  # so may the first of two
            if wanted or time.monotonic() - refreshed_at >= _PUBLISH_SECONDS:
                with suppress(KvStoreError):
                    self.refresh()
                refreshed_at = time.monotonic()

    def _doubt(self) -> None:
        self._doubted_at = time.monotonic()

    def _is_count_due(self) -> bool:
        """Return whether this worker counts now: one does in each interval, and after a doubt."""
        take = ("SET", self._keys.counted, 1, "PX", int(1000 * _COUNT_SECONDS))
        if self._execute(*take, "NX") is not None:
            return True
        if self._doubted_at is None:
            return False
        age = _COUNT_SECONDS - int(self._execute("PTTL", self._keys.counted)) / 1000
        if time.monotonic() - age > self._doubted_at:
            self._doubted_at = None  # another worker has counted since
            return False
        return age >= _RECOUNT_SECONDS and self._execute(*take) is not None

    def _describe_shortage(self, needed: int) -> str | None:
        limit = self.limit_bytes
        if limit is not None and self.used_bytes + needed > limit:
            return f"{self.used_bytes} of {limit} are in use"
        if self._explicit_limit is None:
            for memory in self._memory:
                if memory.limit and memory.used + self._changed > MEMORY_SHARE * memory.limit:
                    return f"its memory is in use: {memory.used} of {memory.limit} bytes"
        return None

    def _take_over(self, total: int, changed: int) -> None:
        """Continue from the published sum, which has `changed` bytes of this worker's changes."""
        with self._lock:
            self._published = total
            self._changed -= changed

    def _sum_sizes(self, client: Redis) -> int:
        """Sum the bytes of the pages that one server has."""
        names = scan_names(client, self._keys.pages)
        total = 0
        for first in range(0, len(names), _SIZES):
            batch = names[first : first + _SIZES]
            total += sum(self.read_sizes(run_batch(client, self.list_size_commands(batch))))
        return total

    def _execute(self, command: str, key: str, *arguments: str | int) -> Any:
        # As a raw command: redis-py would convert the replies of some.
        return self._server.run_pipelined([key], lambda _: (command, key, *arguments))[0]


def _read_memory(client: Redis) -> ServerMemory:
    (info,) = run_batch(client, [("INFO", "memory")])
    fields = {name: int(value) for name, value in _MEMORY_FIELD.findall(info)}
    return ServerMemory(fields.get(b"used_memory", 0), fields.get(b"maxmemory", 0))
