"""Pages in Redis, which several workers share: one server, a primary behind sentinels, or a cluster.

All keys of a session have one hash tag, so a session lies in one slot and its books change in one script; sessions
spread over a cluster. A page is first stored under a name of its own and renamed into place together with its entry in
the session's index (`redis_scripts.py`), so no reader meets half a page or a page without an entry. Everything of a
session lives for `ttl_seconds` after it was last written or read: its keys expire together, with the sum of its bytes.

Durable means: `put` returns when the primary has the pages and, where it has replicas, one of these has them too. That
outlives the loss of one server. Whether a restart of all of them is survived is their configuration: `appendonly yes`
keeps what was written through kill -9, `appendfsync always` through a loss of power, `min-replicas-to-write 1` stops a
primary that is cut off from taking writes, and `maxmemory-policy noeviction` keeps pages until they expire.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from redis import Redis

from kvstore.errors import InvariantError, StoreClosedError, TierError, TierFullError
from kvstore.format.page import (
    HEADER_BYTES,
    VERSION,
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    parse_header,
    verify_checksum,
)
from kvstore.tiers.arena import Buffers
from kvstore.tiers.redis import scripts as redis_scripts
from kvstore.tiers.redis.client import RedisServer, parse_address, replicated
from kvstore.tiers.redis.zero_copy import Command, large_values

BATCH_BYTES = 1 << 20
"""No call is much larger, but for a page that is: Redis serves others in between, and buffers this large are used again
(with 4 MB and more, where each is new memory, it took two to ten times as long)."""

_BUFFER_BYTES = 1 << 27
"""Of memory that pages are received into, again and again: it costs less than new memory."""

_TTL_SECONDS = 14 * 24 * 3600
_STAGED_MILLISECONDS = 60_000
_BATCH_PAGES = 1000
_TOUCH_SECONDS = 600.0
_UNLISTED_SECONDS = 3600
_FENCE_MILLISECONDS = 3600_000
"""How long a session without pages is fenced: whoever is late by more has long lost its connections."""

_COUNT_SECONDS = 5.0

_Page = tuple[PageKey, PageHeader, Blob]


class RedisTier:
    """A Tier on the Redis at `url` (forms: `parse_address`). Stores of another model or layout share it unseen.

    `namespace` keeps deployments apart. `limit_bytes` bounds the pages of the namespace and model; it is compared with
    a count a few seconds old, so several writers may exceed it a little. Raises TierSettingsError for a URL that
    cannot be read and TierFailedError when Redis does not answer. Its messages never hold the URL's password.
    """

    def __init__(
        self,
        url: str,
        layout: PageLayout,
        *,
        namespace: str = "kvrecall",
        ttl_seconds: float = _TTL_SECONDS,
        limit_bytes: int | None = None,
        timeout_seconds: float = 5.0,
        name: str = "redis",
    ) -> None:
        self._server = RedisServer(parse_address(url), timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._prefix = f"{quote(namespace, safe='')}:{VERSION}:{_layout_hash(layout)}"
        self._ttl = int(1000 * ttl_seconds)
        self._touch_seconds = min(_TOUCH_SECONDS, ttl_seconds / 8)
        self._limit_bytes = limit_bytes
        self._get_pages = max(1, BATCH_BYTES // layout.page_bytes)
        self._name = name
        self._writer = uuid4().hex
        self._written = count()
        self._buffers = Buffers(_BUFFER_BYTES)
        self._lock = Lock()
        self._touched: dict[str, float] = {}
        self._used_bytes = 0
        self._counted_at = float("-inf")
        self._closed = False
        try:
            self._count_used_bytes()
        except TierError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def durable(self) -> bool:
        return True

    @property
    def shared(self) -> bool:
        return True

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all workers, headers included; as last known while Redis does not answer."""
        try:
            return self._count_used_bytes()
        except (TierError, StoreClosedError):
            return self._used_bytes

    def fence(self, session: str, epoch: int) -> None:
        self._require_open()
        index = self._index(session)
        self._write(index, ("EVAL", redis_scripts.FENCE, 1, index, epoch, self._ttl))

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        self._require_open()
        found: dict[PageKey, Blob] = {}
        for session, asked in _by_session(keys):
            found |= self._get_some(session, asked)
            self._touch(session)
        return [found.get(key) for key in keys]

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        self._require_open()
        for session, batch in _batches([(key, parse_header(blob), blob) for key, blob in pages]):
            self._require_room(sum(len(blob) for _, _, blob in batch))
            if session not in self._touched:
                self._list(session)
            self._grow(
                self._server.run(
                    self._index(session), partial(self._put_some, pages=batch, epoch=epoch)
                )
            )
            self._touch(session)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._require_open()
        found = []
        for first in range(0, len(keys), _BATCH_PAGES):
            names = [self._page(key) for key in keys[first : first + _BATCH_PAGES]]
            found += self._server.pipelined(names, lambda name: ("EXISTS", name))
        return [bool(exists) for exists in found]

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        self._require_open()
        for session, asked in _by_session(keys):
            self._remove(session, asked, "all", epoch)
            self._touched.pop(session, None)

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        self._require_open()
        headers: list[PageHeader] = []
        for name in self._sessions() if session is None else [session]:
            raw, lost = self._call(redis_scripts.HEADERS, name)
            headers += [parse_header(header) for header in raw]
            if lost:
                self._remove(name, [PageKey(name, int(number)) for number in lost], "lost")
        return iter(headers)

    def flush(self) -> None:
        """Nothing is left to wait for: `put` and `delete` return when primary and replica have done it."""
        self._require_open()

    def check(self) -> None:
        self._require_open()
        for session in self._sessions():
            if wrong := self._call(redis_scripts.AUDIT, session):
                said = "; ".join(text.decode() for text in wrong[:3])
                raise InvariantError(
                    f"tier {self._name}: session {session!r}: {said}; does Redis evict pages? "
                    "Its maxmemory-policy should be noeviction"
                )

    def close(self) -> None:
        self._closed = True
        self._server.close()

    def _get_some(self, session: str, keys: Sequence[PageKey]) -> dict[PageKey, Blob]:
        names = list(map(self._page, keys))
        blobs = self._server.run(
            self._index(session),
            lambda client: large_values(client, names, self._buffers.lend, self._get_pages),
        )
        found: dict[PageKey, Blob] = {
            key: blob for key, blob in zip(keys, blobs, strict=True) if blob is not None
        }
        for key, blob in found.items():
            verify_checksum(blob, key)
        if lost := [key for key in keys if key not in found]:
            with suppress(TierError):  # the books can wait, the reader cannot
                self._remove(session, lost, "lost")
        return found

    def _put_some(self, client: Redis, pages: Sequence[_Page], epoch: int | None) -> int:
        """Store pages of one session and return by how many bytes it grew."""
        index = self._index(pages[0][0].session)
        staged = [f"{index}:put:{self._writer}:{next(self._written)}" for _ in pages]
        stage: list[Command] = [
            ("SET", name, memoryview(blob), "PX", _STAGED_MILLISECONDS)
            for name, (_, _, blob) in zip(staged, pages, strict=True)
        ]
        names = [
            name
            for pair in zip([self._page(key) for key, _, _ in pages], staged, strict=True)
            for name in pair
        ]
        entries = [
            part
            for key, header, blob in pages
            for part in (key.index, header.sequence, len(blob), bytes(blob[:HEADER_BYTES]))
        ]
        commit: Command = (
            "EVAL",
            redis_scripts.COMMIT,
            1 + len(names),
            index,
            *names,
            self._ttl,
            _or_empty(epoch),
            *entries,
        )
        return int(replicated(client, [*stage, commit], self._timeout_seconds)[-1])

    def _remove(
        self, session: str, keys: Sequence[PageKey], which: str, epoch: int | None = None
    ) -> None:
        index = self._index(session)
        for first in range(0, len(keys), _BATCH_PAGES):
            some = keys[first : first + _BATCH_PAGES]
            command: Command = (
                "EVAL",
                redis_scripts.DELETE,
                1 + len(some),
                index,
                *map(self._page, some),
                which,
                _or_empty(epoch),
                _FENCE_MILLISECONDS,
                *(key.index for key in some),
            )
            self._grow(-int(self._write(index, command)))

    def _touch(self, session: str) -> None:
        """Have a session live on, now and then. That it did not work is no reason not to read."""
        if time.monotonic() - self._touched.get(session, float("-inf")) < self._touch_seconds:
            return
        with suppress(TierError):
            if self._call(redis_scripts.TOUCH, session, self._ttl):
                self._list(session)
                self._touched[session] = time.monotonic()

    def _list(self, session: str) -> None:
        """Name a session among those that have pages: before it has any, so that none is ever overlooked."""
        listing = self._listing
        self._write(listing, ("EVAL", redis_scripts.LIST, 1, listing, session, self._ttl))

    def _sessions(self) -> list[str]:
        names: list[bytes] = self._ask(self._listing, "ZRANGE", self._listing, 0, -1)
        return [name.decode() for name in names]

    def _count_used_bytes(self) -> int:
        """Sum over the sessions, forgetting the names of those that ended long ago."""
        self._require_open()
        sessions = self._sessions()
        sums = self._server.pipelined(
            [self._index(session) for session in sessions], lambda k: ("HGET", k, "bytes")
        )
        total = sum(int(used or 0) for used in sums)
        with self._lock:
            self._used_bytes = total
            self._counted_at = time.monotonic()
        ended = [session for session, used in zip(sessions, sums, strict=True) if used is None]
        if ended:
            self._ask(
                self._listing,
                "EVAL",
                redis_scripts.UNLIST,
                1,
                self._listing,
                _UNLISTED_SECONDS,
                *ended,
            )
        return total

    def _require_room(self, wanted: int) -> None:
        if self._limit_bytes is None:
            return
        recent = time.monotonic() - self._counted_at < _COUNT_SECONDS
        used = self._used_bytes if recent else self._count_used_bytes()
        if (
            used + wanted > self._limit_bytes
            and self._count_used_bytes() + wanted > self._limit_bytes
        ):
            raise TierFullError(
                f"tier {self._name}: {wanted} bytes do not fit, {self._used_bytes} of "
                f"{self._limit_bytes} are in use; raise its limit or drop sessions"
            )

    def _grow(self, by: int) -> None:
        with self._lock:
            self._used_bytes += by

    def _call(self, script: str, session: str, *arguments: str | int) -> Any:
        index = self._index(session)
        return self._ask(index, "EVAL", script, 1, index, *arguments)

    def _ask(self, key: str, *command: str | int) -> Any:
        """The reply to a command that is run where `key` is."""
        return self._server.run(key, lambda client: client.execute_command(*command))

    def _write(self, key: str, command: Command) -> Any:
        """As `_ask`, for a change: it returns when a replica has it, if there is one."""
        return self._server.run(
            key, lambda client: replicated(client, [command], self._timeout_seconds)
        )[-1]

    @property
    def _listing(self) -> str:
        return f"{self._prefix}:sessions"

    def _index(self, session: str) -> str:
        # Quoted: a brace in a session's name would end the hash tag.
        return f"{self._prefix}:{{{quote(session, safe='')}}}"

    def _page(self, key: PageKey) -> str:
        return f"{self._index(key.session)}:{key.index}"

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self._name} is closed")


def _or_empty(epoch: int | None) -> int | str:
    """An epoch as scripts take it."""
    return "" if epoch is None else epoch


def _layout_hash(layout: PageLayout) -> str:
    """Stands for model, shape and dtype in the keys' names."""
    return blake2b(repr(layout).encode(), digest_size=12).hexdigest()


def _by_session(keys: Sequence[PageKey]) -> list[tuple[str, list[PageKey]]]:
    by_session: dict[str, list[PageKey]] = {}
    for key in keys:
        by_session.setdefault(key.session, []).append(key)
    return list(by_session.items())


def _batches(pages: Sequence[_Page]) -> Iterator[tuple[str, list[_Page]]]:
    """Pages of one session each, in their order, at most `BATCH_BYTES` of them unless one page is larger."""
    by_session: dict[str, list[_Page]] = {}
    for page in pages:
        session = page[0].session
        batch = by_session.setdefault(session, [])
        if batch and sum(len(blob) for _, _, blob in batch) + len(page[2]) > BATCH_BYTES:
            yield session, batch
            batch = by_session[session] = []
        batch.append(page)
    yield from by_session.items()
