"""The catalog on Redis, which several gateways share: one server, Sentinel, or a cluster.

All keys of a session have one hash tag, so a session lies in one slot, and each commit is one
script there, which checks the epoch. A commit carries an id that is stored with the session: sent
again, because a connection was cut or a primary replaced, it changes nothing and returns the first
result. What lies in other slots (indexes, sums, the tree of pages) is written in such an order that a
crash in between leaves at worst an entry too many, which is verified when it is read and swept in
time. A session goes only by a deletion; idempotency records expire after a day.

Durability: a commit returns when the primary has it and, if it has replicas, one of them has it
too. That survives the loss of one server. Whether a restart of all of them is survived depends on
their configuration: `appendonly yes` with `appendfsync always` keeps what was written through kill
-9 and a loss of power (`everysec` may lose the last two seconds to either when the disk is busy),
`min-replicas-to-write 1` stops a primary that is cut off from taking writes, and `maxmemory-policy
noeviction` keeps Redis from dropping sessions when memory runs out: a server that may evict any key
is refused. A server without memory still lets sessions be claimed, taken over and deleted. Redis
6.2 or later is required.

A server that comes back without the catalog, empty or with another one, is refused (`scripts/identity.py`).
"""

import secrets
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.page_ids import KEY_BYTES
from services.catalog.encryption.encryption import Encryption
from services.catalog.encryption.keyring import Keyring
from services.catalog.encryption.opening import (
    from_stored_secret,
    is_current_secret,
    open_encryption,
    to_stored_secret,
)
from services.catalog.owners import Owners
from services.catalog.redis import scripts
from services.catalog.redis.api_keys import RedisApiKeys
from services.catalog.redis.connection.client import CatalogRedis, Client, RedisIdentity
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.data_keys import RedisDataKeys
from services.catalog.redis.deletion import SessionDeletion
from services.catalog.redis.episodes import RedisEpisodes
from services.catalog.redis.expiry import RedisExpiry
from services.catalog.redis.histories import RedisHistories
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.page_tree import RedisPageTree
from services.catalog.redis.indexes.tenant_use import RedisTenantUse, SessionGrowth
from services.catalog.redis.leases import RedisLeases
from services.catalog.redis.memories import RedisMemories
from services.catalog.redis.pages import RedisPages
from services.catalog.redis.repairs import RedisRepairs
from services.catalog.redis.responses import RedisConversations, RedisResponses
from services.catalog.redis.sessions import RedisSessions
from services.catalog.redis.slot.slot import SessionSlots
from services.catalog.redis.tool_calls import RedisToolCalls
from services.catalog.redis.turns import RedisTurns
from services.catalog.versions import build_catalog_version

# The version of the keys and values that this program writes and reads.
SCHEMA_VERSION = 8


class RedisCatalog:
    """A `Catalog` of the keys that begin with a namespace."""

    def __init__(
        self,
        redis: CatalogRedis,
        keys: Keys,
        id: str,
        secret: bytes,
        owners: Owners,
        encryption: Encryption,
    ) -> None:
        """`secret`: the catalog's, unwrapped. `owners`: the tenants of sessions."""
        self.id = id
        self.secret = secret
        slots = SessionSlots(redis, keys, encryption.tenants)
        use = RedisTenantUse(redis, keys)
        growth = SessionGrowth(slots, use, owners)
        indexes = RedisIndexes(redis, keys, slots, use)
        self.expiry = RedisExpiry(redis, keys, slots, indexes)
        tree = RedisPageTree(redis, keys, slots)
        self.memories = RedisMemories(redis, keys, slots, encryption)
        deletion = SessionDeletion(redis, keys, slots, indexes, self.expiry, tree)
        self._redis = redis
        self.data_keys = encryption.keys
        self.idempotency = RedisIdempotency(redis, keys, encryption)
        self.api_keys = RedisApiKeys(redis, keys)
        self.pages = RedisPages(tree, deletion)
        self.sessions = RedisSessions(
            slots,
            indexes,
            self.expiry,
            self.memories,
            self.idempotency,
            deletion,
            use,
            growth,
            tree,
            encryption,
            owners,
        )
        self.leases = RedisLeases(redis, keys, slots)
        self.histories = RedisHistories(redis, keys, encryption)
        self.responses = RedisResponses(redis, keys, use, encryption)
        self.conversations = RedisConversations(redis, keys, use, encryption, self.idempotency)
        self.turns = RedisTurns(
            slots,
            indexes,
            self.histories,
            self.expiry,
            growth,
            tree,
            encryption,
            self.idempotency,
        )
        self.tool_calls = RedisToolCalls(slots, indexes, growth, encryption, self.idempotency)
        self.repairs = RedisRepairs(slots, growth, encryption)
        self.episodes = RedisEpisodes(slots, encryption)

    @classmethod
    async def open(
        cls,
        client: Client,
        namespace: str,
        *,
        timeout_seconds: float = 5.0,
        patience_seconds: float = 15.0,
        keyring: Keyring | None = None,
    ) -> "RedisCatalog":
        """Open the catalog that `client` reaches; a missing one is created.

        The catalog owns the client from then on; the client must reply with bytes. Failures that
        may pass are retried for `patience_seconds`: as long as a failover takes. With a `keyring`
        values are encrypted. Raises CatalogVersion for another version, CatalogError when Redis does
        not answer or evicts keys of any kind, or the catalog is encrypted with other keys.
        """
        redis = CatalogRedis(client, timeout_seconds, patience_seconds)
        keys = Keys(namespace)
        try:
            await _require_no_eviction(redis)
            await _require_version(redis, keys)
            id = await _get_id(redis, keys)
            secret = await _get_secret(redis, keys, keyring)
            redis.require(RedisIdentity(keys, id, str(SCHEMA_VERSION)))
            owners = Owners(partial(_read_tenant, redis, keys.get_meta))
            encryption = await open_encryption(
                keyring,
                secret,
                RedisDataKeys(redis, keys),
                owners,
                partial(_read_tenant, redis, keys.get_conversation),
            )
        except BaseException:
            await redis.close()
            raise
        return cls(redis, keys, id, secret, owners, encryption)

    async def has_room(self) -> bool:
        """Return whether more may be stored. Raises CatalogError."""
        return await self._redis.has_room()

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.close()


async def _require_no_eviction(redis: CatalogRedis) -> None:
    for policy in await redis.get_eviction_policies():
        if policy.startswith("allkeys-"):
            raise CatalogError(
                f"the catalog's Redis evicts keys (maxmemory-policy {policy}): it would drop sessions "
                "when its memory is full; set maxmemory-policy to noeviction"
            )


async def _require_version(redis: CatalogRedis, keys: Keys) -> None:
    """Note the version in a new namespace. Raises CatalogVersion for one of another version."""
    found = await redis.read(keys.version, "GET", keys.version)
    if found is None:
        await redis.write(keys.version, "SET", keys.version, str(SCHEMA_VERSION), "NX")
        found = await redis.read(keys.version, "GET", keys.version)
    version = bytes(found or b"").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        location = f"the namespace {keys.namespace!r} in Redis"
        raise build_catalog_version(location, version, SCHEMA_VERSION)


async def _get_id(redis: CatalogRedis, keys: Keys) -> str:
    """Return the catalog's id, which the first process that opens it makes."""
    await redis.write(keys.id, "SET", keys.id, uuid4().hex, "NX")
    return bytes(await redis.read(keys.id, "GET", keys.id)).decode()


async def _get_secret(redis: CatalogRedis, keys: Keys, keyring: Keyring | None) -> bytes:
    """Return the catalog's secret, which the first process that opens it makes.

    It is wrapped by the operator's current key from now on.
    """
    name = keys.secret
    made = to_stored_secret(keyring, secrets.token_bytes(KEY_BYTES))
    await redis.write(name, "SET", name, made, "NX")
    stored = bytes(await redis.read(name, "GET", name))
    secret = from_stored_secret(keyring, stored)
    if not is_current_secret(keyring, stored):
        wrapped = to_stored_secret(keyring, secret)
        await redis.write(name, "EVAL", scripts.SET_IF_EQUAL, 1, name, wrapped, stored, "")
    return secret


async def _read_tenant(redis: CatalogRedis, get_key: Callable[[str], str], id: str) -> str | None:
    """Read the tenant of a session or a conversation, None if there is none."""
    name = get_key(id)
    found: bytes | None = await redis.read(name, "HGET", name, "tenant")
    return None if found is None else found.decode()
