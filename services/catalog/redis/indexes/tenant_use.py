"""What each tenant has, in the Redis catalog: entries and their sums in one hash of the tenant.

The hash lies in another slot than what it counts, so a write first adds what it may grow by, in one
step with the check of the limits, and afterwards takes back what it did not. A sum is never under
what is stored, so no number of writes at once is over a limit. What a crash left too much is found
by a comparison of some entries with what they count, at each query; an entry that has changed within
a minute is left alone: its write may be under way. Commits that grow a session go through
`SessionGrowth`.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvrecall.domain.errors import CatalogError, ServiceError
from services.catalog.owners import Owners
from services.catalog.quota import UNLIMITED, Countable, TenantLimits, TenantUse, build_refusal
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Argument, Command
from services.catalog.redis.slot.commits import RedisCommit
from services.catalog.redis.slot.slot import Applied, SessionSlots, was_refused

# Longer than a write is repeated.
_UNDER_WAY_SECONDS = 60
_ENTRIES_COMPARED = 4
_ANY = "*"
_TOKENS, _BYTES = "", "#"
# Kinds of entries of bytes; a session's is named by its id.
CONVERSATION, RESPONSE = "conversation ", "response "


@dataclass(frozen=True)
class Growth:
    """What a write may add: `tokens` are those that a session has after it (None: as before).

    `name` is the session's id, or one of the kinds above and an id.
    """

    name: str
    bytes: int
    tokens: int | None = None


class RedisTenantUse:
    """Reads and changes what tenants have. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def get(self, tenant: str) -> TenantUse:
        """Return what a tenant has, with writes that have begun."""
        names = (self._keys.get_sessions(tenant), self._keys.get_conversations(tenant))
        use = self._keys.get_lengths(tenant)
        await asyncio.gather(self._correct(tenant), self._correct_conversations(tenant))
        sessions, conversations, sums = await self._redis.read_each(
            [*((name, ("ZCARD", name)) for name in names), (use, ("HMGET", use, _TOKENS, _BYTES))]
        )
        tokens, size = (int(held or 0) for held in sums)
        return TenantUse(int(sessions), int(conversations), tokens, size)

    async def reserve(self, tenant: str, growth: Growth, limits: TenantLimits = UNLIMITED) -> None:
        """Add what a write may grow by, before it. Raises QuotaExceeded, and adds nothing then."""
        changes = [(f"{_BYTES}{growth.name}", f"{growth.bytes:+d}", _ANY)]
        if growth.tokens is not None:
            changes.append((growth.name, str(growth.tokens), _ANY))
        held, which = await self._change(tenant, changes, limits)
        if held >= 0:
            what: Countable = "bytes" if which == b"#" else "tokens"
            limit = getattr(limits, what)
            assert limit is not None, "only a limit that was sent is exceeded"
            raise build_refusal(what, held, limit)

    async def settle(self, tenant: str, growth: Growth, grown: int) -> None:
        """Note that a write is done and grew by `grown` bytes; it stands even if this fails."""
        if grown != growth.bytes:
            change = (f"{_BYTES}{growth.name}", f"{grown - growth.bytes:+d}", _ANY)
            with suppress(CatalogError):
                await self._change(tenant, [change])

    async def release(self, tenant: str, growth: Growth) -> None:
        """Take back what a write that was refused was to grow by."""
        changes = [(f"{_BYTES}{growth.name}", f"{-growth.bytes:+d}", _ANY)]
        with suppress(CatalogError):
            if growth.tokens is not None:
                name, *read = self._build_read(tenant, growth.name)
                held = await self._redis.read(read[0], name, *read)
                changes.append((growth.name, "" if held is None else str(int(held)), _ANY))
            await self._change(tenant, changes)

    async def remove(self, tenant: str, name: str) -> None:
        """Remove what is deleted; `name` is that of its growth."""
        await self._change(tenant, [(name, "", _ANY), (f"{_BYTES}{name}", "", _ANY)])

    async def _change(
        self,
        tenant: str,
        changes: Sequence[tuple[str, str | bytes, str | bytes]],
        limits: TenantLimits = UNLIMITED,
    ) -> tuple[int, bytes]:
        name = self._keys.get_lengths(tenant)
        most = ["" if limit is None else limit for limit in (limits.tokens, limits.bytes)]
        words: list[Argument] = [*most, _UNDER_WAY_SECONDS]
        for change in changes:
            words += change
        held, which = await self._redis.read(name, "EVAL", scripts.CHANGE_USE, 1, name, *words)
        return int(held), which

    async def _correct(self, tenant: str) -> None:
        """Compare a few random entries with what they count, and correct them."""
        name = self._keys.get_lengths(tenant)
        command: Command = ("HRANDFIELD", name, _ENTRIES_COMPARED, "WITHVALUES")
        drawn = _to_entries(await self._redis.read(name, *command))
        reads = [self._build_read(tenant, entry) for entry in drawn]
        found = await self._redis.read_each([(read[1], read) for read in reads])
        changes = [
            (entry, str(int(truth)) if truth else "", noted)
            for (entry, noted), truth in zip(drawn.items(), found, strict=True)
            if int(noted.partition(b"@")[0]) != int(truth or 0) or not truth
        ]
        if changes:
            await self._change(tenant, changes)

    async def _correct_conversations(self, tenant: str) -> None:
        """Remove what is left of creations and deletions that broke off, of a few random entries."""
        index = self._keys.get_conversations(tenant)
        command: Command = ("ZRANDMEMBER", index, _ENTRIES_COMPARED, "WITHSCORES")
        drawn = _pair(await self._redis.read(index, *command))
        names = [self._keys.get_conversation(id.decode()) for id, _ in drawn]
        exist = await self._redis.read_each([(name, ("EXISTS", name)) for name in names])
        oldest = time.time() - _UNDER_WAY_SECONDS
        for (id, created_at), exists in zip(drawn, exist, strict=True):
            if not exists and float(created_at) < oldest:
                await self._redis.read(index, "ZREM", index, id)

    def _build_read(self, tenant: str, entry: str) -> tuple[str, ...]:
        """Build the command that reads what an entry counts: nothing, or zero, if it is gone."""
        name = entry.removeprefix(_BYTES)
        if not entry.startswith(_BYTES):
            return ("HGET", self._keys.get_meta(entry), "length")
        if name.startswith(CONVERSATION):
            return ("HGET", self._keys.get_conversation(name.removeprefix(CONVERSATION)), "bytes")
        if name.startswith(RESPONSE):
            return ("STRLEN", self._keys.get_response(name.removeprefix(RESPONSE), tenant))
        return ("HGET", self._keys.get_meta(name), "bytes")


def _to_entries(reply: Sequence[Any]) -> Mapping[str, bytes]:
    """Return entries and their texts, but not the sums."""
    return {field.decode(): noted for field, noted in _pair(reply) if field not in (b"", b"#")}


def _pair(reply: Sequence[Any]) -> Sequence[tuple[bytes, Any]]:
    if reply and isinstance(reply[0], bytes):  # the older version of the protocol
        return list(zip(reply[::2], reply[1::2], strict=True))
    return reply


class SessionGrowth:
    """Applies commits that store more of a session. Raises as `SessionSlots.apply`, QuotaExceeded."""

    def __init__(self, slots: SessionSlots, use: RedisTenantUse, owners: Owners) -> None:
        """`owners`: the tenants of sessions."""
        self._slots = slots
        self._use = use
        self._owners = owners

    async def apply(
        self,
        session_id: str,
        commit: RedisCommit,
        *,
        tokens: int | None,
        limits: TenantLimits = UNLIMITED,
        tenant: str | None = None,
        epoch: int | str = "",
        record: IdempotencyRecord | None = None,
    ) -> Applied:
        """Apply a commit after which the session has `tokens` (None: as before).

        `tenant` is that of a session that does not exist yet.
        """
        if tenant is None:
            # Of an unknown one the commit says that there is no such session.
            tenant = await self._owners.find(session_id) or ""
        growth = Growth(session_id, commit.count_bytes(), tokens)
        await self._use.reserve(tenant, growth, limits)
        try:
            applied = await self._slots.apply(session_id, commit, epoch=epoch, record=record)
        except ServiceError as error:
            if was_refused(error):
                await self._use.release(tenant, growth)
            raise
        await self._use.settle(tenant, growth, applied.grown)
        return applied
