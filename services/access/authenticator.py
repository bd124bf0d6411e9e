"""Authentication: from what a request says of its sender to a principal."""

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address

import structlog

from kvrecall.domain.errors import CatalogError, InvalidRequest, Unauthenticated
from services.access.cache import KeyCache
from services.access.keys import ApiKey, digest_key, get_pepper_id, parse_key
from services.access.principals import (
    MAX_TENANT_LENGTH,
    Credentials,
    Principal,
    Scope,
    is_tenant_name,
)
from services.access.settings import REVOCATION_SECONDS
from services.catalog.api_keys import ApiKeys, KeyRecord
from services.catalog.waiting import ask_catalog

# The last use of a key is written at most this often, by each gateway.
_TOUCH_SECONDS = 60.0
_TOUCHED = 10_000
_NO_KEY = "this service needs a key: send it as Authorization: Bearer KEY, or as x-api-key"
_WRONG_KEY = "the key is unknown, expired or revoked"
_log = structlog.get_logger("kvrecall.access")


@dataclass(frozen=True)
class AccessPolicy:
    """Whom to believe.

    `open`: while the catalog has no key, everybody is believed and may name a tenant, as only this
    machine reaches the service. `api_key` is one key of the default tenant with all rights, `pepper`
    verifies the keys in the catalog.
    """

    open: bool = True
    api_key: str | None = None
    pepper: bytes | None = None
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    cache_seconds: float = REVOCATION_SECONDS


class Authenticator:
    """Authenticates requests, of any protocol."""

    def __init__(self, keys: ApiKeys, policy: AccessPolicy) -> None:
        self._keys = keys
        self._policy = policy
        self._cache = KeyCache(keys.get, policy.cache_seconds)
        self._api_key = None if policy.api_key is None else _hash(policy.api_key)
        self._pepper_id = "" if policy.pepper is None else get_pepper_id(policy.pepper)
        self._keys_exist = False
        self._looked_at = float("-inf")
        # By key id, the monotonic time at which its last use was written.
        self._touched: OrderedDict[str, float] = OrderedDict()
        self._touches: set[asyncio.Task[None]] = set()

    async def authenticate(
        self, credentials: Credentials, patience: float | None = None
    ) -> Principal:
        """Return the sender of a request. Raises Unauthenticated, InvalidRequest, CatalogError.

        A trusted proxy's word counts first: it names a tenant. Then the key counts. Without both a
        sender is believed only while no key is needed. With `patience` what the catalog said last
        counts where it does not answer within these seconds.
        """
        proxied = self._is_trusted(credentials.peer)
        if proxied and credentials.tenant is not None:
            return _believe(credentials.tenant)
        if (proxied or self._policy.open) and not await self._needs_key(patience):
            return _believe(credentials.tenant)
        if credentials.key is None:
            raise Unauthenticated(_NO_KEY)
        if self._api_key is not None and hmac.compare_digest(_hash(credentials.key), self._api_key):
            return Principal("", key="api-key")
        return await self._identify(credentials.key, patience)

    async def stop(self) -> None:
        """Wait until last uses are written."""
        if self._touches:
            await asyncio.wait(self._touches)

    def _is_trusted(self, peer: str) -> bool:
        if not self._policy.trusted_proxies:
            return False
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._policy.trusted_proxies)

    async def _needs_key(self, patience: float | None) -> bool:
        """Return whether there is a key. One that was made elsewhere counts within seconds."""
        if self._api_key is not None or self._keys_exist:
            return True
        now = time.monotonic()
        if now >= self._looked_at + self._policy.cache_seconds:
            try:
                # Once true, always: keys are never deleted.
                self._keys_exist = await ask_catalog(self._keys.exist(), patience)
            except CatalogError:
                if patience is None or self._looked_at == float("-inf"):
                    raise
            else:
                self._looked_at = now
        return self._keys_exist

    async def _identify(self, text: str, patience: float | None) -> Principal:
        key = parse_key(text)
        record = None if key is None else await self._cache.get(key.id, patience)
        if key is None or record is None or not self._verify(record, key):
            raise Unauthenticated(_WRONG_KEY)
        if not record.is_usable(time.time()):
            raise Unauthenticated(_WRONG_KEY)
        self._note_use(record)
        return Principal(record.tenant, frozenset(map(Scope, record.scopes)), record.id)

    def _verify(self, record: KeyRecord, key: ApiKey) -> bool:
        if self._policy.pepper is None or record.pepper != self._pepper_id:
            _log.warning("a key was made under another pepper than this gateway's", key=record.id)
            return False
        return hmac.compare_digest(digest_key(key, self._policy.pepper), record.digest)

    def _note_use(self, record: KeyRecord) -> None:
        """Write the time of a key's last use, if it was not written within a minute."""
        now = time.monotonic()
        age = time.time() - (record.last_used_at or 0.0)
        if (
            age < _TOUCH_SECONDS
            or now < self._touched.get(record.id, float("-inf")) + _TOUCH_SECONDS
        ):
            return
        self._touched[record.id] = now
        self._touched.move_to_end(record.id)
        if len(self._touched) > _TOUCHED:
            self._touched.popitem(last=False)
        task = asyncio.create_task(self._touch(record.id), name="key touch")
        self._touches.add(task)
        task.add_done_callback(self._touches.discard)

    async def _touch(self, key_id: str) -> None:
        with suppress(CatalogError):  # the request does not depend on it
            await self._keys.touch(key_id, time.time())


def _believe(tenant: str | None) -> Principal:
    """Return the principal that a believed sender names. Raises InvalidRequest."""
    if tenant is None:
        return Principal("")
    if not is_tenant_name(tenant):
        message = f"the name of a tenant has 1 to {MAX_TENANT_LENGTH} letters, digits and . _ -"
        raise InvalidRequest("tenant", message)
    return Principal(tenant)


def _hash(text: str) -> bytes:
    """Return a digest of fixed length: a comparison tells nothing of the text's length."""
    return hashlib.sha256(text.encode()).digest()
