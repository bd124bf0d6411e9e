"""Encrypted catalogs that are opened again, by other keys or by none."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from kvrecall_server.app.redis import redis_client
from services.catalog.base import Catalog
from services.catalog.encryption.keyring import Keyring
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog


class Place:
    """Where the catalog of a test is: opened any number of times, and read as a thief would."""

    def __init__(self, path: Path | None, server: Any, namespace: str) -> None:
        self.path = path
        self._server = server
        self._namespace = namespace
        self._opened: list[Catalog] = []

    async def open(self, keyring: Keyring | None) -> Catalog:
        """Open the catalog; a file is closed before, as one process uses it."""
        if self.path is not None:
            await self.close()
            self._opened.append(await SqliteCatalog.open(self.path, keyring=keyring))
        else:
            client = redis_client(self._server.url)
            opened = await RedisCatalog.open(client, self._namespace, keyring=keyring)
            self._opened.append(opened)
        return self._opened[-1]

    async def close(self) -> None:
        """Close what is open."""
        for catalog in self._opened:
            await catalog.close()
        self._opened.clear()

    def steal(self) -> bytes:
        """Return all bytes that the catalog stores: of its files, or of its keys."""
        if self.path is not None:
            files = self.path.parent.glob(f"{self.path.name}*")
            return b"\n".join(file.read_bytes() for file in files)
        client: redis.Redis = self._server.client
        names = list(client.scan_iter(f"{self._namespace}:*"))
        return b"\n".join(each for name in names for each in (name, *_read(client, name)))


def _read(client: Any, name: bytes) -> list[bytes]:
    """Read all values of a key of any type."""
    match client.type(name):
        case b"string":
            return [client.get(name)]
        case b"list":
            return list(client.lrange(name, 0, -1))
        case b"hash":
            return [each for item in client.hgetall(name).items() for each in item]
        case b"set":
            return list(client.smembers(name))
        case b"zset":
            return list(client.zrange(name, 0, -1))
        case kind:
            raise AssertionError(f"no catalog has keys of type {kind!r}")


@pytest.fixture(params=["sqlite", "redis"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """An empty place for a catalog: a file, and a namespace of a Redis server."""
    if request.param == "sqlite":
        place = Place(tmp_path / "catalog.db", None, "")
    else:
        place = Place(None, request.getfixturevalue("redis_server"), uuid4().hex)
    yield place
    await place.close()


@pytest.fixture
async def shared_place(redis_server: Any) -> AsyncIterator[Place]:
    """An empty place for a catalog that several gateways open at once."""
    place = Place(None, redis_server, uuid4().hex)
    yield place
    await place.close()
