"""Tier in a Redis that several workers share: one server, a primary with sentinels, or a cluster.

A page is the value of one key, which is written whole, so no reader sees half a page. It
expires `ttl_seconds` after it was last kept, and a day after it was put: what a turn that was cut off put
does not stay for longer. Deleting a page condemns it: it expires after two minutes, since another worker may
have found it and be about to use it; keeping it, or putting it again, saves it.

Durable means: `put` returns when the primary has the pages and, where it has replicas, one of these
has them too. That survives the loss of one server. What survives a restart of all servers is their
configuration: `appendonly yes` with `appendfsync always` survives kill -9 and a loss of power (with
`everysec` a server whose disk is busy answers before it writes, and a kill loses up to two
seconds), `min-replicas-to-write 1` stops an isolated primary from accepting writes, and
`maxmemory-policy noeviction` keeps pages until they expire; a server that may evict any key is
refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis import Redis

from kvstore.errors import (
    CorruptPageError,
    KvStoreError,
    PageError,
    StoreClosedError,
    TierSettingsError,
)
from kvstore.format.page import (
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageId,
    PageLayout,
    parse_header,
    verify_checksum,
)
from kvstore.tiers.arena import BufferPool
from kvstore.tiers.base import was_written_before
from kvstore.tiers.redis.address import parse_address
from kvstore.tiers.redis.client import RedisServer, run_replicated, scan_names
from kvstore.tiers.redis.keys import RedisKeys
from kvstore.tiers.redis.usage import SharedUsage
from kvstore.tiers.redis.zero_copy import Command, get_large_values

BATCH_BYTES = 1 << 20
"""Maximum bytes of the pages in one call, except for a larger page. Redis serves other clients in
between and reuses buffers of this size; calls of 4 MB and more took two to ten times as long."""

# Memory that pages are received into is reused, which costs less than new memory.
_BUFFER_BYTES = 1 << 27
_TTL_SECONDS = 14 * 24 * 3600
_NEW_MILLISECONDS = 24 * 3600 * 1000
_CONDEMNED_MILLISECONDS = 120_000
_BATCH_PAGES = 1000


class RedisTier:
    """A Tier on the Redis at `url`; stores of other models or layouts share it unseen.

    Error messages never contain the URL's password.

    Args:
        url: Address of the server in a form of `parse_address`.
        layout: Shape, dtype and fingerprint of the rows.
        namespace: Prefix of all keys, which separates deployments.
        ttl_seconds: Seconds until a page expires after it was kept.
        limit_bytes: Maximum bytes of the pages of this namespace and layout. It is compared with a
            sum that is a few seconds old (`SharedUsage`), so several writers may exceed it a little.
            By default `PAGES_SHARE` of the servers' maxmemory, and no page is accepted while a server
            uses more than `MEMORY_SHARE` of it: the rest is left to a catalog on the same server.
        timeout_seconds: Seconds after which a silent server counts as failed.
        name: Name of the tier for metrics.

    Raises:
        TierSettingsError: The URL is malformed, or the server evicts keys of any kind.
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
        self._new_milliseconds = min(_NEW_MILLISECONDS, self._ttl_milliseconds)
        self._get_pages = max(1, BATCH_BYTES // layout.page_bytes)
        self._buffers = BufferPool(_BUFFER_BYTES)
        # Pages whose value this process found damaged.
        self._damaged = set[PageId]()
        # Less than the life of any page that was just kept.
        self._condemned_milliseconds = min(_CONDEMNED_MILLISECONDS, self._ttl_milliseconds // 2)
        self._usage = SharedUsage(
            self._server,
            self._keys,
            self._ttl_milliseconds,
            self._condemned_milliseconds,
            limit_bytes,
        )
        self._closed = False
        try:
            self._require_no_eviction()
            self._usage.start()
        except KvStoreError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all workers, headers included, cached: see `SharedUsage`."""
        return self._usage.used_bytes

    @property
    def life_seconds(self) -> float:
        """Seconds after which a page expires that was kept."""
        return self._ttl_milliseconds / 1000

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes of pages; None when neither the settings nor Redis limit them."""
        return self._usage.limit_bytes

    def get_device(self) -> None:
        """Return None: the server's disk is not this process's to look at."""

    def count_used_bytes(self) -> int:
        """Count the bytes of all workers' pages now, one page after the other."""
        self._require_open()
        return self._usage.count()

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Read and verify pages, None where there is none. Raises CorruptPageError."""
        self._require_open()
        blobs = self._server.run_per_server(
            self._name(ids),
            lambda client, names: get_large_values(
                client, names, self._buffers.allocate, self._get_pages
            ),
        )
        for page_id, blob in zip(ids, blobs, strict=True):
            if blob is not None:
                self._verify(page_id, blob)
        return list(blobs)

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Store pages on the primary and, if it has any, on a replica."""
        self._require_open()
        for batch in _split_into_batches(pages):
            self._put_batch(dict(batch))

    def keep(self, ids: Sequence[PageId]) -> None:
        """Restart the time to live of pages, on the primary and, if it has any, on a replica."""
        self._expire(ids, self._ttl_milliseconds)

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether Redis has each page, and it was not found damaged."""
        self._require_open()
        found = self._run_in_batches(ids, lambda name: ("EXISTS", name))
        return [
            bool(each) and page_id not in self._damaged
            for page_id, each in zip(ids, found, strict=True)
        ]

    def delete(self, ids: Sequence[PageId]) -> None:
        """Condemn pages, on the primary and, if it has any, on a replica; unknown ids are ignored."""
        freed = self._expire(ids, self._condemned_milliseconds)
        self._usage.add(-freed)

    def stored(self) -> Iterator[PageHeader]:
        """Yield the headers of all pages, those condemned included; of broken ones `page_tokens` is 0."""
        self._require_open()
        found = self._server.run_on_all(lambda client: scan_names(client, self._keys.pages))
        return self._read_headers([self._keys.read_id(name) for names in found for name in names])

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time in unix seconds."""
        return [
            header.id
            for header in self.stored()
            if was_written_before(header.written_at, written_before)
        ]

    def flush(self) -> None:
        """Do nothing: `put` and `delete` return when primary and replica have completed them."""
        self._require_open()

    def check(self) -> None:
        """Do nothing: beside the pages there is only the sum of their bytes, which is not exact."""
        self._require_open()

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._usage.close()
        self._closed = True
        self._server.close()

    def _name(self, ids: Sequence[PageId]) -> list[str]:
        return [self._keys.page(page_id) for page_id in ids]

    def _verify(self, page_id: PageId, blob: Blob) -> None:
        try:
            verify_checksum(blob, page_id)
        except CorruptPageError:
            self._damaged.add(page_id)
            raise
        self._damaged.discard(page_id)  # another worker has put it again

    def _put_batch(self, pages: Mapping[PageId, Blob]) -> None:
        blobs = {self._keys.page(page_id): blob for page_id, blob in pages.items()}
        self._usage.require_room(sum(map(len, pages.values())))

        def put(client: Redis, names: list[str]) -> list[int]:
            """Store pages of one server; returns the bytes that each key counted before."""
            commands = self._usage.list_size_commands(names)
            commands += [
                ("SET", name, memoryview(blobs[name]), "PX", self._new_milliseconds)
                for name in names
            ]
            replies = run_replicated(client, commands, self._timeout_seconds)
            return self._usage.read_sizes(replies[: -len(names)])

        replaced = self._server.run_per_server(list(blobs), put)
        self._usage.add(sum(map(len, pages.values())) - sum(replaced))
        self._damaged.difference_update(pages)

    def _expire(self, ids: Sequence[PageId], milliseconds: int) -> int:
        """Set the time to live of pages; returns when a replica, if any, has it.

        Returns the bytes that the pages counted before.
        """
        self._require_open()

        def expire(client: Redis, names: list[str]) -> list[int]:
            commands = self._usage.list_size_commands(names)
            commands += [("PEXPIRE", name, milliseconds) for name in names]
            replies = run_replicated(client, commands, self._timeout_seconds)
            return self._usage.read_sizes(replies[: -len(names)])

        counted = 0
        for first in range(0, len(ids), _BATCH_PAGES):
            names = self._name(ids[first : first + _BATCH_PAGES])
            counted += sum(self._server.run_per_server(names, expire))
        return counted

    def _read_headers(self, ids: Sequence[PageId]) -> Iterator[PageHeader]:
        for first in range(0, len(ids), _BATCH_PAGES):
            batch = ids[first : first + _BATCH_PAGES]
            headers = self._run_in_batches(
                batch, lambda name: ("GETRANGE", name, 0, HEADER_BYTES - 1)
            )
            for page_id, header in zip(batch, headers, strict=True):
                if header:  # it has not expired
                    yield _parse(page_id, header)

    def _run_in_batches(
        self, ids: Sequence[PageId], build_command: Callable[[str], Command]
    ) -> list[Any]:
        replies = []
        for first in range(0, len(ids), _BATCH_PAGES):
            names = self._name(ids[first : first + _BATCH_PAGES])
            replies += self._server.run_pipelined(names, build_command)
        return replies

    def _require_no_eviction(self) -> None:
        """Raise TierSettingsError if Redis may evict any key."""
        for info in self._server.run_on_all(lambda client: client.info("memory")):
            policy = info.get("maxmemory_policy", "")
            if policy.startswith("allkeys-"):
                raise TierSettingsError(
                    f"{self._server} evicts keys (maxmemory-policy {policy}): it would drop pages "
                    "that were acknowledged as durable; set maxmemory-policy to noeviction"
                )

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")


def _parse(page_id: PageId, header: bytes) -> PageHeader:
    """Parse a page's header; an unreadable one becomes a header without the fields of a layout."""
    with suppress(PageError):
        parsed = parse_header(header)
        if parsed.id == page_id:
            return parsed
    return PageHeader(page_id)


def _split_into_batches(
    pages: Sequence[tuple[PageId, Blob]],
) -> Iterator[list[tuple[PageId, Blob]]]:
    """Split pages into batches of at most BATCH_BYTES, unless a page is larger."""
    batch: list[tuple[PageId, Blob]] = []
    for page in pages:
        if batch and sum(len(blob) for _, blob in batch) + len(page[1]) > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(page)
    if batch:
        yield batch
