"""Tier in a Redis that several workers share: one server, a primary with sentinels, or a cluster.

All keys of a session have one hash tag, so a session is in one slot and its index changes in one
script; sessions spread over a cluster. A page is first staged under a temporary key, then renamed
into place together with its entry in the session's index (`scripts/commit.lua`), so no reader sees
half a page or a page without an entry. A session expires `ttl_seconds` after its last write or
read: index, pages and the sum of their bytes together.

Durable means: `put` returns when the primary has the pages and, where it has replicas, one of these
has them too. That survives the loss of one server. What survives a restart of all servers is their
configuration: `appendonly yes` with `appendfsync always` survives kill -9 and a loss of power (with
`everysec` a server whose disk is busy answers before it writes, and a kill loses up to two
seconds), `min-replicas-to-write 1` stops an isolated primary from accepting writes, and
`maxmemory-policy noeviction` keeps pages until they expire; a server that may evict any key is
refused.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Lock
from typing import Any
from uuid import uuid4

from redis import Redis

from kvstore.errors import (
    InvariantError,
    KvStoreError,
    StoreClosedError,
    TierError,
    TierSettingsError,
)
from kvstore.format.page import (
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    parse_header,
    verify_checksum,
)
from kvstore.tiers.arena import BufferPool
from kvstore.tiers.base import one_per_session
from kvstore.tiers.redis import scripts
from kvstore.tiers.redis.address import parse_address
from kvstore.tiers.redis.batches import ParsedPage, group_by_session, split_into_batches
from kvstore.tiers.redis.client import RedisServer, run_replicated
from kvstore.tiers.redis.keys import KEY_FORMAT, RedisKeys
from kvstore.tiers.redis.usage import SharedUsage
from kvstore.tiers.redis.zero_copy import Command, get_large_values

BATCH_BYTES = 1 << 20
"""Maximum bytes of the pages in one call, except for a larger page. Redis serves other clients in
between and reuses buffers of this size; calls of 4 MB and more took two to ten times as long."""

# Memory that pages are received into is reused, which costs less than new memory.
_BUFFER_BYTES = 1 << 27
_TTL_SECONDS = 14 * 24 * 3600
_STAGED_MILLISECONDS = 60_000
_BATCH_PAGES = 1000
_TOUCH_SECONDS = 600.0
# Life of the fence of a session without pages. Connections of late writers end long before.
_FENCE_MILLISECONDS = 3600_000


class RedisTier:
    """A Tier on the Redis at `url`; stores of other models or layouts share it unseen.

    Error messages never contain the URL's password.

    Args:
        url: Address of the server in a form of `parse_address`.
        layout: Shape, dtype and fingerprint of the rows.
        namespace: Prefix of all keys, which separates deployments.
        ttl_seconds: Seconds after its last read or write until a session expires.
        limit_bytes: Maximum bytes of the pages of this namespace and layout. It is compared with a
            sum that is a few seconds old, so several writers may exceed it a little. By default
            `PAGES_SHARE` of the servers' maxmemory, and no page is accepted while a server uses
            more than `MEMORY_SHARE` of it: the rest is left to a catalog on the same server.
        timeout_seconds: Seconds after which a silent server counts as failed.
        name: Name of the tier for metrics.

    Raises:
        TierSettingsError: The URL is malformed, the server evicts keys of any kind, or a newer
            kvrecall wrote the namespace.
        TierFailedError: Redis does not answer.
    """

    durable = True
    shared = True

    def __init__(
        self,
        url: str,
        layout: PageLayout,
        *,
        namespace: str = "kvrecall",
        ttl_seconds: float = _TTL_SECONDS,
        limit_bytes: int | None = None,
        timeout_seconds: float = 1.5,
        name: str = "redis",
    ) -> None:
        self.name = name
        self._server = RedisServer(parse_address(url), timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._keys = RedisKeys.build(namespace, layout)
        self._ttl_milliseconds = int(1000 * ttl_seconds)
        self._touch_seconds = min(_TOUCH_SECONDS, ttl_seconds / 8)
        self._get_pages = max(1, BATCH_BYTES // layout.page_bytes)
        self._writer_id = uuid4().hex
        self._staged_numbers = count()
        self._buffers = BufferPool(_BUFFER_BYTES)
        self._lock = Lock()
        self._touched: OrderedDict[str, float] = OrderedDict()
        self._usage = SharedUsage(self._server, self._keys, self._ttl_milliseconds, limit_bytes)
        self._closed = False
        try:
            self._require_no_eviction()
            self._has_marker = self._check_format(namespace)
            self._usage.start()
        except KvStoreError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all workers, headers included, cached: a few seconds old."""
        return self._usage.used_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes of pages; None when neither the settings nor Redis limit them."""
        return self._usage.limit_bytes

    def get_device(self) -> None:
        """Return None: the server's disk is not this process's to look at."""

    def count_used_bytes(self) -> int:
        """Count the bytes of all workers' pages now, one session after the other."""
        self._require_open()
        return self._usage.count()

    def fence(self, session: str, epoch: int) -> None:
        """Refuse writes and deletions under earlier epochs. Raises StaleWriterError."""
        self._require_open()
        index = self._keys.index(session)
        self._execute_replicated(
            index, ("EVAL", scripts.FENCE, 1, index, epoch, self._ttl_milliseconds)
        )

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        """Read and verify pages, None where there is none. Raises CorruptPageError."""
        self._require_open()
        found: dict[PageKey, Blob] = {}
        for session, session_keys in group_by_session(keys):
            found |= self._get_session_pages(session, session_keys)
            self._touch(session)
        return [found.get(key) for key in keys]

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Store pages on the primary and, if it has any, on a replica."""
        self._require_open()
        parsed = [(key, parse_header(blob), blob) for key, blob in pages]
        for session, batch in split_into_batches(parsed, BATCH_BYTES):
            self._usage.require_room(sum(len(blob) for _, _, blob in batch))
            if session not in self._touched:
                self._register(session)
            grown = self._server.run(
                self._keys.index(session), partial(self._put_batch, pages=batch, epoch=epoch)
            )
            self._usage.add(grown)
            self._touch(session)

    def touch(self, session: str) -> None:
        """Restart the time to live of a session's pages, at most once in an interval."""
        self._require_open()
        self._touch(session)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return whether Redis has each page."""
        self._require_open()
        replies = []
        for first in range(0, len(keys), _BATCH_PAGES):
            names = [self._keys.page(key) for key in keys[first : first + _BATCH_PAGES]]
            replies += self._server.run_pipelined(names, lambda name: ("EXISTS", name))
        return [bool(reply) for reply in replies]

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        """Delete pages; unknown keys are ignored. Raises StaleWriterError."""
        self._require_open()
        for session, session_keys in group_by_session(keys):
            self._remove(session, session_keys, "all", epoch)
            with self._lock:
                self._touched.pop(session, None)

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        """Return the headers of all pages, or of those of one session."""
        self._require_open()
        headers: list[PageHeader] = []
        for name in self._list_sessions() if session is None else [session]:
            raw, lost = self._run_script(scripts.HEADERS, name)
            headers += [parse_header(header) for header in raw]
            if lost:
                self._remove(name, [PageKey(name, int(number)) for number in lost], "lost")
        return iter(headers)

    def session_headers(self) -> Iterator[PageHeader]:
        """Return one header per session, of any of its pages."""
        return one_per_session(self.stored())

    def flush(self) -> None:
        """Do nothing: `put` and `delete` return when primary and replica have completed them."""
        self._require_open()

    def check(self) -> None:
        """Raise InvariantError when a session's index disagrees with its pages."""
        self._require_open()
        for session in self._list_sessions():
            if discrepancies := self._run_script(scripts.AUDIT, session):
                details = "; ".join(text.decode() for text in discrepancies[:3])
                raise InvariantError(
                    f"tier {self.name}: session {session!r}: {details}; if Redis evicts pages, "
                    "set its maxmemory-policy to noeviction"
                )

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._usage.close()
        self._closed = True
        self._server.close()

    def _get_session_pages(self, session: str, keys: Sequence[PageKey]) -> dict[PageKey, Blob]:
        names = [self._keys.page(key) for key in keys]
        blobs = self._server.run(
            self._keys.index(session),
            lambda client: get_large_values(client, names, self._buffers.allocate, self._get_pages),
        )
        found: dict[PageKey, Blob] = {
            key: blob for key, blob in zip(keys, blobs, strict=True) if blob is not None
        }
        for key, blob in found.items():
            verify_checksum(blob, key)
        if lost := [key for key in keys if key not in found]:
            with suppress(TierError):  # The index can be corrected later; the read is urgent.
                self._remove(session, lost, "lost")
        return found

    def _put_batch(self, client: Redis, pages: Sequence[ParsedPage], epoch: int | None) -> int:
        """Store pages of one session; return the bytes by which it grew."""
        index = self._keys.index(pages[0][0].session)
        staged = [f"{index}:put:{self._writer_id}:{next(self._staged_numbers)}" for _ in pages]
        stage: list[Command] = [
            ("SET", name, memoryview(blob), "PX", _STAGED_MILLISECONDS)
            for name, (_, _, blob) in zip(staged, pages, strict=True)
        ]
        names = [
            name
            for (key, _, _), staged_name in zip(pages, staged, strict=True)
            for name in (self._keys.page(key), staged_name)
        ]
        entries = [
            part
            for key, header, blob in pages
            for part in (key.index, header.sequence, len(blob), bytes(blob[:HEADER_BYTES]))
        ]
        commit: Command = (
            "EVAL",
            scripts.COMMIT,
            1 + len(names),
            index,
            *names,
            self._ttl_milliseconds,
            _to_epoch_argument(epoch),
            *entries,
        )
        return int(run_replicated(client, [*stage, commit], self._timeout_seconds)[-1])

    def _remove(
        self, session: str, keys: Sequence[PageKey], which: str, epoch: int | None = None
    ) -> None:
        index = self._keys.index(session)
        for first in range(0, len(keys), _BATCH_PAGES):
            batch = keys[first : first + _BATCH_PAGES]
            command: Command = (
                "EVAL",
                scripts.DELETE,
                1 + len(batch),
                index,
                *map(self._keys.page, batch),
                which,
                _to_epoch_argument(epoch),
                _FENCE_MILLISECONDS,
                *(key.index for key in batch),
            )
            self._usage.add(-int(self._execute_replicated(index, command)))

    def _touch(self, session: str) -> None:
        """Restart a session's time to live at intervals; an error must not fail the read."""
        if not self._forget_old_touches(session):
            return
        with suppress(TierError):
            if self._run_script(scripts.TOUCH, session, self._ttl_milliseconds):
                self._register(session)
                with self._lock:
                    self._touched[session] = time.monotonic()
                    self._touched.move_to_end(session)

    def _forget_old_touches(self, session: str) -> bool:
        """Forget touches that are longer ago than the interval; return whether `session` is due."""
        begin = time.monotonic() - self._touch_seconds
        with self._lock:
            while self._touched and next(iter(self._touched.values())) <= begin:
                self._touched.popitem(last=False)
            return session not in self._touched

    def _require_no_eviction(self) -> None:
        """Raise TierSettingsError if Redis may evict indexes and fences, not only old pages."""
        info = self._server.run(self._keys.format, lambda client: client.info("memory"))
        policy = info.get("maxmemory_policy", "")
        if policy.startswith("allkeys-"):
            raise TierSettingsError(
                f"{self._server} evicts keys (maxmemory-policy {policy}): it would drop indexes and "
                "fences of sessions with pages; set maxmemory-policy to noeviction"
            )

    def _check_format(self, namespace: str) -> bool:
        """Return whether the namespace has the format marker.

        Raises TierSettingsError for another format.
        """
        marker = self._execute(self._keys.format, "GET", self._keys.format)
        if marker is not None and marker != str(KEY_FORMAT).encode():
            raise TierSettingsError(
                f"namespace {namespace!r} of {self._server} has key format "
                f"{marker.decode(errors='replace')}, but this kvrecall reads format {KEY_FORMAT}; "
                "use the kvrecall that wrote it, or choose another namespace"
            )
        return marker is not None

    def _register(self, session: str) -> None:
        """Add a session to the set of sessions, before its first page so that none is missed."""
        if not self._has_marker:
            self._execute_replicated(
                self._keys.format, ("SET", self._keys.format, KEY_FORMAT, "NX")
            )
            self._has_marker = True
        sessions = self._keys.sessions
        self._execute_replicated(
            sessions, ("EVAL", scripts.REGISTER, 1, sessions, session, self._ttl_milliseconds)
        )

    def _list_sessions(self) -> list[str]:
        return [name for names in self._usage.scan_sessions() for name in names]

    def _run_script(self, script: str, session: str, *arguments: str | int) -> Any:
        index = self._keys.index(session)
        return self._execute(index, "EVAL", script, 1, index, *arguments)

    def _execute(self, key: str, *command: str | int) -> Any:
        """Run a command on the server that has `key`."""
        return self._server.run(key, lambda client: client.execute_command(*command))

    def _execute_replicated(self, key: str, command: Command) -> Any:
        """Run a write on the server that has `key`; returns when a replica, if any, has it."""
        return self._server.run(
            key, lambda client: run_replicated(client, [command], self._timeout_seconds)
        )[-1]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")


def _to_epoch_argument(epoch: int | None) -> int | str:
    """Encode an optional epoch as scripts expect it: empty for none."""
    return "" if epoch is None else epoch
