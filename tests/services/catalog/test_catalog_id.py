"""A catalog has an id and a secret of its own."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

from kvrecall.domain.page_ids import KEY_BYTES
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog


async def test_a_file_keeps_its_id_and_its_secret_and_another_has_others(tmp_path: Path) -> None:
    ids, secrets = [], []
    for name in ("one.db", "one.db", "other.db"):
        catalog = await SqliteCatalog.open(tmp_path / name)
        ids.append(catalog.id)
        secrets.append(catalog.secret)
        await catalog.close()
    assert ids[0] == ids[1] != ids[2]
    assert secrets[0] == secrets[1] != secrets[2]
    assert all(len(id) == 32 for id in ids)
    assert all(len(secret) == KEY_BYTES for secret in secrets)


async def test_gateways_of_one_namespace_share_its_id_and_its_secret(
    open_catalog: Callable[..., Awaitable[RedisCatalog]], redis_url: str
) -> None:
    namespaces = uuid4().hex, uuid4().hex
    one = await open_catalog(redis_url, namespaces[0])
    same = await open_catalog(redis_url, namespaces[0])
    other = await open_catalog(redis_url, namespaces[1])
    assert one.id == same.id != other.id
    assert one.secret == same.secret != other.secret
    assert len(one.secret) == KEY_BYTES
