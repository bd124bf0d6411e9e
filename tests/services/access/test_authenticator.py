"""Authentication: whom it believes, how soon it forgets, and what a flood of guesses costs."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError, InsufficientScope, InvalidRequest, Unauthenticated
from kvrecall_server.testing import open_catalog
from services.access import authenticator, cache
from services.access.authenticator import AccessPolicy, Authenticator
from services.access.keys import ApiKey, digest_key, get_pepper_id, make_key
from services.access.principals import ALL_SCOPES, Credentials, Principal, Scope
from services.catalog.api_keys import ApiKeys, KeyRecord

PEPPER = b"0123456789abcdef"
CLOSED = AccessPolicy(open=False, pepper=PEPPER)
PROXIES = (ip_network("10.1.0.0/16"), ip_network("::1/128"))


class CountedKeys:
    """Keys of a catalog, with a count of the reads and one that may fail."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self.reads: list[str] = []
        self.touches = 0
        self.failing = False
        self.running = self.most_running = 0

    async def get(self, key_id: str) -> KeyRecord | None:
        self.reads.append(key_id)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(0)
            if self.failing:
                raise CatalogError("it is down")
            return await self._keys.get(key_id)
        finally:
            self.running -= 1

    async def touch(self, key_id: str, at: float) -> None:
        self.touches += 1
        await self._keys.touch(key_id, at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)


@pytest.fixture
async def keys() -> AsyncIterator[CountedKeys]:
    async with open_catalog() as catalog:
        yield CountedKeys(catalog.api_keys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of cache and authenticator, as one number to be changed."""
    now = [1000.0]
    for module in (cache, authenticator):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


async def add(keys: CountedKeys, tenant: str = "ann", **fields: Any) -> ApiKey:
    key = make_key()
    record = KeyRecord(
        key.id, digest_key(key, PEPPER), get_pepper_id(PEPPER), tenant, "", ("infer",), time.time()
    )
    await keys.add(replace(record, **fields))
    return key


def sent(key: str | None = None, tenant: str | None = None, peer: str = "") -> Credentials:
    return Credentials(key, tenant, peer)


async def test_a_key_is_its_tenants_with_its_scopes(keys: CountedKeys) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    principal = await access.authenticate(sent(key.text, tenant="ben", peer="127.0.0.1"))
    assert principal == Principal("ann", frozenset({Scope.INFER}), key.id)
    principal.require([Scope.INFER, Scope.ADMIN])
    with pytest.raises(InsufficientScope):
        principal.require([Scope.SESSIONS])


async def test_what_is_no_valid_key_is_refused_with_one_message(keys: CountedKeys) -> None:
    access = Authenticator(keys, CLOSED)
    valid = await add(keys)
    expired = await add(keys, expires_at=time.time() - 1)
    revoked = await add(keys, revoked_at=1.0)
    messages = set()
    for text in (
        expired.text,
        revoked.text,
        make_key().text,
        ApiKey(valid.id, make_key().secret).text,
        "nonsense",
    ):
        with pytest.raises(Unauthenticated) as caught:
            await access.authenticate(sent(text))
        messages.add(caught.value.message)
    assert len(messages) == 1
    with pytest.raises(Unauthenticated):
        await access.authenticate(sent())


async def test_a_key_of_another_pepper_is_refused(keys: CountedKeys) -> None:
    key = await add(keys)
    for pepper in (None, b"another pepper 16"):
        with pytest.raises(Unauthenticated):
            await Authenticator(keys, replace(CLOSED, pepper=pepper)).authenticate(sent(key.text))


async def test_everybody_is_believed_until_there_is_a_key(
    keys: CountedKeys, clock: list[float]
) -> None:
    access = Authenticator(keys, AccessPolicy(pepper=PEPPER))
    assert await access.authenticate(sent("ignored", "ben")) == Principal("ben", ALL_SCOPES)
    assert await access.authenticate(sent()) == Principal("")
    key = await add(keys, revoked_at=1.0)
    clock[0] += 10.0
    for credentials in (sent(), sent(tenant="ben"), sent(key.text)):
        with pytest.raises(Unauthenticated):
            await access.authenticate(credentials)


async def test_a_name_is_believed_from_a_trusted_proxy_only(keys: CountedKeys) -> None:
    access = Authenticator(keys, replace(CLOSED, trusted_proxies=PROXIES))
    for peer in ("10.1.2.3", "::1", "::ffff:10.1.2.3"):
        assert (await access.authenticate(sent("x", "ben", peer))).tenant == "ben"
        assert (await access.authenticate(sent(None, None, peer))).tenant == ""
        for name in ("", "a b", "x" * 65, "a\n"):
            with pytest.raises(InvalidRequest):
                await access.authenticate(sent(None, name, peer))
    for peer in ("10.2.0.1", "", "no address", "127.0.0.1", "::2"):
        with pytest.raises(Unauthenticated):
            await access.authenticate(sent(None, "ben", peer))


async def test_a_proxy_that_names_nobody_needs_a_key_once_there_is_one(keys: CountedKeys) -> None:
    key = await add(keys)
    access = Authenticator(keys, replace(CLOSED, trusted_proxies=PROXIES))
    with pytest.raises(Unauthenticated):
        await access.authenticate(sent(None, None, "10.1.2.3"))
    assert (await access.authenticate(sent(key.text, None, "10.1.2.3"))).tenant == "ann"
    assert (await access.authenticate(sent(key.text, "ben", "10.1.2.3"))).tenant == "ben"


async def test_a_revocation_holds_after_ten_seconds_at_the_latest(
    keys: CountedKeys, clock: list[float]
) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    for _ in range(3):
        assert await access.authenticate(sent(key.text))
    assert len(keys.reads) == 1
    await keys.revoke(key.id, 1.0)
    clock[0] += 10.0
    with pytest.raises(Unauthenticated):
        await access.authenticate(sent(key.text))


async def test_a_catalog_that_fails_admits_nobody_and_is_asked_again(
    keys: CountedKeys, clock: list[float]
) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    keys.failing = True
    answers = await asyncio.gather(
        *(access.authenticate(sent(key.text)) for _ in range(3)), return_exceptions=True
    )
    assert [type(each) for each in answers] == [CatalogError] * 3
    keys.failing = False
    assert await access.authenticate(sent(key.text))


async def test_a_flood_of_guesses_costs_a_bounded_number_of_reads_and_entries(
    keys: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_ENTRIES", 50)
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    await access.authenticate(sent(key.text))
    guesses = [make_key().text for _ in range(200)]
    for _ in range(2):
        answers = await asyncio.gather(
            *(access.authenticate(sent(text)) for text in guesses[:100] * 2),
            return_exceptions=True,
        )
        assert {type(each) for each in answers} == {Unauthenticated}
    assert keys.most_running <= 16
    assert len(access._cache._unknown) == 50
    reads = len(keys.reads)
    await access.authenticate(sent(key.text))  # no guess has displaced it
    for text in ("nonsense", "kvr-", "x" * 100_000):
        with pytest.raises(Unauthenticated):
            await access.authenticate(sent(text))
    assert len(keys.reads) == reads


async def test_requests_with_one_key_share_a_read(keys: CountedKeys) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    await asyncio.gather(*(access.authenticate(sent(key.text)) for _ in range(20)))
    assert len(keys.reads) == 1


async def test_a_cancelled_request_does_not_fail_those_that_wait_for_the_same_key(
    keys: CountedKeys,
) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    first = asyncio.create_task(access.authenticate(sent(key.text)))
    second = asyncio.create_task(access.authenticate(sent(key.text)))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tenant == "ann"


async def test_the_last_use_is_written_once_a_minute(keys: CountedKeys, clock: list[float]) -> None:
    access = Authenticator(keys, CLOSED)
    key = await add(keys)
    for second in (0.0, 5.0, 30.0, 24.9):
        clock[0] += second
        await access.authenticate(sent(key.text))
        await access.stop()
    assert keys.touches == 1
    record = await keys.get(key.id)
    assert record is not None
    assert record.last_used_at is not None
