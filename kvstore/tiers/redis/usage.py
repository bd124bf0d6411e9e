"""Bytes of the pages in Redis: a cached sum, kept up to date by a thread of its own.

The sum of all workers is one key. Each worker adds its own changes to it every few seconds and
takes over the result, so a reading costs nothing however many sessions there are. Expired sessions change
the sum unseen, and a worker that is killed takes its unpublished changes with it: one worker counts
all sessions again from time to time, and soon after a start, a failure, a call that was sent again
or a full tier. A count adds the difference to the sum, so that it keeps what others publish meanwhile.
What they changed before and publish after is then in the sum twice, but such a count differs from the
sum: it is repeated by one of those who doubt the sum, after ever longer times, until one agrees.
"""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

from redis import Redis

from kvstore.errors import KvStoreError, TierFullError
from kvstore.tiers.redis import scripts
from kvstore.tiers.redis.client import RedisServer
from kvstore.tiers.redis.keys import RedisKeys
from kvstore.tiers.redis.zero_copy import run_batch

PAGES_SHARE = 0.7
"""Default limit of the pages, as a share of Redis' `maxmemory`."""
MEMORY_SHARE = 0.85
"""Share of `maxmemory` in use, by whatever data, from which pages are refused by default."""

_PUBLISH_SECONDS = 5.0
_PROBE_SECONDS = 0.5
_COUNT_SECONDS = 600.0
# A sum that is in doubt is counted again once the last count is this old, then twice as old.
_RECOUNT_SECONDS = 30.0
_MAX_RECOUNT_SECONDS = 60.0
# Share of the sum by which a count may differ from it: changes that are under way.
_TOLERANCE = 1e-3
_AGREED = "agreed"
_UNREGISTER_SECONDS = 3600
_SCAN_SESSIONS = 1000

_MEMORY_FIELD = re.compile(rb"^(used_memory|maxmemory):(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class ServerMemory:
    """Memory of one server in bytes: in use, and its `maxmemory` (0: no limit)."""

    used: int
    limit: int


class SharedUsage:
    """Cached sum of the bytes of all sessions, the limit for it, and the thread behind both.

    The thread also probes a server that does not answer, so that no call waits for it meanwhile.
    `limit_bytes` is the operator's limit; None derives one from the servers' `maxmemory`.
    """

    def __init__(
        self, server: RedisServer, keys: RedisKeys, ttl_milliseconds: int, limit_bytes: int | None
    ) -> None:
        self._server = server
        self._keys = keys
        self._ttl_milliseconds = ttl_milliseconds
        self._explicit_limit = limit_bytes
        self._published = 0
        self._changed = 0
        self._memory: list[ServerMemory] = []
        self._lock = Lock()
        self._refresh_wanted = Event()
        # The monotonic time since which the sum may be wrong by more than what is unpublished.
        self._doubted_at: float | None = None
        self._recount_seconds = _RECOUNT_SECONDS
        self._repeated_calls = 0
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvstore-redis-usage", daemon=True)

    @property
    def _lease(self) -> str:
        """Key that the last count holds for a while; its value tells whether it agreed."""
        return f"{self._keys.used}:counted"

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
        self._doubt()  # a worker that was killed before may not have published its changes
        self._thread.start()

    def add(self, amount: int) -> None:
        """Add the bytes by which this worker changed the sum."""
        with self._lock:
            self._changed += amount

    def require_room(self, needed: int) -> None:
        """Raise TierFullError unless `needed` bytes fit, as of the last refresh."""
        shortage = self._describe_shortage(needed)
        if shortage is None:
            return
        self._doubt()  # expired sessions may have made room
        self._refresh_wanted.set()
        raise TierFullError(
            f"{self._server}: {needed} bytes do not fit, {shortage}; raise its limit or delete "
            "sessions"
        )

    def refresh(self) -> None:
        """Publish this worker's changes and read the sum and the servers' memory.

        Counts all sessions when no sum is there or the last count is old. Raises a tier's error.
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
        """Sum the bytes of all sessions and return them; correct the sum, unregister ended sessions.

        Raises a tier's error.
        """
        started = time.monotonic()
        changed = self._changed
        published = self._execute("GET", self._keys.used)
        before = int(published or 0)
        total = 0
        ended: list[str] = []
        for names in self.scan_sessions():
            sums = self._server.run_pipelined(
                [self._keys.index(name) for name in names], lambda index: ("HGET", index, "bytes")
            )
            total += sum(int(used or 0) for used in sums)
            ended += [name for name, used in zip(names, sums, strict=True) if used is None]
        self._take_over(self._correct(published, total - before), changed)
        if self._judge(abs(total - before - changed) <= _TOLERANCE * total, started):
            self._execute("SET", self._lease, _AGREED, "XX", "KEEPTTL", key=self._lease)
        sessions = self._keys.sessions
        for first in range(0, len(ended), _SCAN_SESSIONS):
            batch = ended[first : first + _SCAN_SESSIONS]
            self._execute(
                "EVAL", scripts.UNREGISTER, 1, sessions, _UNREGISTER_SECONDS, *batch, key=sessions
            )
        return total

    def scan_sessions(self) -> Iterator[list[str]]:
        """Yield the registered sessions in batches, each session once. Raises a tier's error."""
        seen = set[bytes]()
        cursor: Any = 0
        while True:
            cursor, reply = self._scan(cursor)
            found = list(dict.fromkeys(reply[::2]))
            names = [name for name in found if name not in seen]
            seen.update(names)
            if names:
                yield [name.decode() for name in names]
            if not int(cursor):
                return

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
                self._doubt()  # calls without a reply may have changed pages
            if self._server.repeated_calls != self._repeated_calls:
                self._repeated_calls = self._server.repeated_calls
                self._doubt()  # so may the first of two
            if wanted or time.monotonic() - refreshed_at >= _PUBLISH_SECONDS:
                with suppress(KvStoreError):
                    self.refresh()
                refreshed_at = time.monotonic()

    def _doubt(self) -> None:
        if self._doubted_at is None:
            self._doubted_at = time.monotonic()
            self._recount_seconds = _RECOUNT_SECONDS

    def _judge(self, agreed: bool, counted_at: float) -> bool:
        """Keep or end the doubt after a count of one's own; return `agreed`."""
        self._doubted_at = None if agreed else counted_at
        self._recount_seconds = min(2 * self._recount_seconds, _MAX_RECOUNT_SECONDS)
        return agreed

    def _is_count_due(self) -> bool:
        """Return whether this worker counts now: one does in each interval, and after a doubt."""
        lease = self._lease
        take = ("SET", lease, "counting", "PX", int(1000 * _COUNT_SECONDS))
        if self._execute(*take, "NX", key=lease) is not None:
            return True
        if self._doubted_at is None:
            return False
        outcome = self._execute("GET", lease, key=lease)
        age = _COUNT_SECONDS - int(self._execute("PTTL", lease, key=lease)) / 1000
        if outcome == _AGREED.encode() and time.monotonic() - age > self._doubted_at:
            self._doubted_at = None  # another worker has counted since
            return False
        return age >= self._recount_seconds and self._execute(*take, key=lease) is not None

    def _describe_shortage(self, needed: int) -> str | None:
        limit = self.limit_bytes
        if limit is not None and self.used_bytes + needed > limit:
            return f"{self.used_bytes} of {limit} are in use"
        if self._explicit_limit is None:
            for memory in self._memory:
                if memory.limit and memory.used + self._changed > MEMORY_SHARE * memory.limit:
                    return f"its memory is in use: {memory.used} of {memory.limit} bytes"
        return None

    def _correct(self, published: bytes | None, difference: int) -> int:
        """Add to the sum the difference between a count and what was published before it."""
        key, lifetime = self._keys.used, self._ttl_milliseconds
        if published is not None:
            total = int(self._execute("INCRBY", key, difference))
            self._execute("PEXPIRE", key, lifetime)
            return total
        if self._execute("SET", key, difference, "PX", lifetime, "NX") is not None:
            return difference
        return int(self._execute("GET", key) or 0)  # another worker has counted at the same time

    def _take_over(self, total: int, changed: int) -> None:
        """Continue from the published sum, which has `changed` bytes of this worker's changes."""
        with self._lock:
            self._published = total
            self._changed -= changed

    def _scan(self, cursor: Any) -> Any:
        sessions = self._keys.sessions
        return self._execute("ZSCAN", sessions, cursor, "COUNT", _SCAN_SESSIONS, key=sessions)

    def _execute(self, *command: str | int, key: str | None = None) -> Any:
        # As a raw command: redis-py would convert the replies of some.
        return self._server.run_pipelined([key or self._keys.used], lambda _: command)[0]


def _read_memory(client: Redis) -> ServerMemory:
    (info,) = run_batch(client, [("INFO", "memory")])
    fields = {name: int(value) for name, value in _MEMORY_FIELD.findall(info)}
    return ServerMemory(fields.get(b"used_memory", 0), fields.get(b"maxmemory", 0))
