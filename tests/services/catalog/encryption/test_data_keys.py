"""Data keys of tenants: made once, whoever is first, wrapped anew after a rotation, and gone within a minute."""

import asyncio
from collections.abc import Mapping

import pytest

from kvrecall.domain.errors import CatalogError
from services.catalog.encryption.data_keys import CACHE_SECONDS, NoDataKeys, StoredDataKeys
from services.catalog.encryption.keyring import make_line, parse_keyring
from services.catalog.encryption.wrapping import get_wrapping_name

OLD, NEW = make_line("old"), make_line("new")


class Store:
    """A store of wrapped keys in memory, which lets others run in each call and counts reads."""

    def __init__(self) -> None:
        self.wrapped: dict[str, bytes] = {}
        self.reads = 0

    async def get(self, tenant: str) -> bytes | None:
        self.reads += 1
        await asyncio.sleep(0)
        return self.wrapped.get(tenant)

    async def get_all(self) -> Mapping[str, bytes]:
        return dict(self.wrapped)

    async def add(self, tenant: str, wrapped: bytes) -> bytes:
        await asyncio.sleep(0)
        return self.wrapped.setdefault(tenant, wrapped)

    async def replace(self, tenant: str, old: bytes, new: bytes) -> None:
        if self.wrapped.get(tenant) == old:
            self.wrapped[tenant] = new

    async def delete(self, tenant: str) -> bool:
        return self.wrapped.pop(tenant, None) is not None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Store:
    return Store()


async def test_a_tenant_has_one_key_of_its_own_which_is_read_once(store: Store) -> None:
    keys = StoredDataKeys(store, parse_keyring(OLD))
    ann = await keys.get_key("ann")
    assert ann is not None
    assert len(ann) == 32
    assert ann == await keys.get_key("ann") != await keys.get_key("bob")
    assert store.reads == 2
    assert ann not in store.wrapped["ann"]


async def test_processes_that_make_a_key_at_once_use_the_same_one(store: Store) -> None:
    keyring = parse_keyring(OLD)
    made = [StoredDataKeys(store, keyring).get_key("ann") for _ in range(8)]
    assert len(set(await asyncio.gather(*made))) == 1


async def test_a_reader_makes_no_key(store: Store) -> None:
    keys = StoredDataKeys(store, parse_keyring(OLD))
    assert await keys.find_cipher("ann") is None
    assert not store.wrapped


async def test_a_key_that_another_process_makes_is_found_at_once(store: Store) -> None:
    reader, writer = (StoredDataKeys(store, parse_keyring(OLD)) for _ in range(2))
    assert await reader.find_cipher("ann") is None
    assert await writer.get_cipher("ann") == await reader.find_cipher("ann")


async def test_a_deleted_key_is_used_by_no_process_for_longer_than_a_minute(store: Store) -> None:
    clock = Clock()
    keys = StoredDataKeys(store, parse_keyring(OLD), clock)
    before = await keys.get_key("ann")
    assert await StoredDataKeys(store, parse_keyring(OLD)).delete("ann")
    clock.now = CACHE_SECONDS - 1
    assert await keys.get_key("ann") == before
    clock.now = CACHE_SECONDS
    assert await keys.find_cipher("ann") is None
    assert await keys.get_key("ann") != before
    assert CACHE_SECONDS <= 60


async def test_keys_are_wrapped_anew_after_which_the_old_line_may_leave(store: Store) -> None:
    before = await StoredDataKeys(store, parse_keyring(OLD)).get_key("ann")
    rotated = StoredDataKeys(store, parse_keyring(f"{NEW}\n{OLD}"))
    assert await rotated.rewrap() == 1
    assert await rotated.rewrap() == 0
    assert get_wrapping_name(store.wrapped["ann"]) == "new"
    assert await StoredDataKeys(store, parse_keyring(NEW)).get_key("ann") == before


async def test_a_key_whose_operator_key_left_too_early_is_an_error_that_names_both(
    store: Store,
) -> None:
    await StoredDataKeys(store, parse_keyring(OLD)).get_key("ann")
    with pytest.raises(CatalogError, match="tenant 'ann' is wrapped by the key 'old'"):
        await StoredDataKeys(store, parse_keyring(NEW)).rewrap()


async def test_keys_in_memory_are_not_shown(store: Store) -> None:
    keys = StoredDataKeys(store, parse_keyring(OLD))
    key = await keys.get_key("ann")
    assert str(key) not in repr(keys._known)


async def test_without_encryption_there_is_no_key() -> None:
    assert await NoDataKeys().get_key("ann") is None
    assert not await NoDataKeys().delete("ann")
