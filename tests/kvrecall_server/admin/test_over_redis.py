"""fsck, export and import with catalog and rows in Redis."""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from kvrecall.domain.page_ids import make_random_id
from kvrecall_server.admin.fsck import EXPIRES
from kvrecall_server.admin.offline import load_layout
from kvrecall_server.app.catalog import open_catalog
from kvstore.format.page import HEADER_BYTES, seal
from kvstore.tiers.redis.tier import RedisTier

Command = Callable[..., Any]
# Of a page in Redis that was deleted.
CONDEMNED_SECONDS = 120


@pytest.fixture
def namespace(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Keys of the test's own, in which every command and service of the test keeps everything."""
    name = uuid4().hex
    monkeypatch.setenv("KVRECALL_CATALOG_URL", redis_url)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", redis_url)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", name)
    return name


@pytest.fixture
def session(namespace: str, tmp_path: Path, serve_one: Callable[[Path], str]) -> str:
    """A session that a service on Redis has made, and stopped."""
    return serve_one(tmp_path / "data")


@pytest.fixture
def tier(redis_url: str, namespace: str, tmp_path: Path, settings_of: Any) -> Iterator[RedisTier]:
    """The rows in Redis."""
    with closing(
        RedisTier(redis_url, load_layout(settings_of(tmp_path / "data")), namespace=namespace)
    ) as opened:
        yield opened


def test_a_service_s_redis_is_clean(command: Command, session: str, tmp_path: Path) -> None:
    found = command("fsck", "--data", tmp_path / "data")
    assert found.exit_code == 0, found.output
    assert "1 sessions" in found.output
    assert "redis: " in found.output


def test_pages_that_redis_lost_are_found(
    command: Command,
    session: str,
    tmp_path: Path,
    tier: RedisTier,
    redis_url: str,
    ids_of: Any,
) -> None:
    shutil.rmtree(tmp_path / "data" / "pages")
    first, second, *_ = ids_of(tmp_path / "data", session)
    with closing(Redis.from_url(redis_url)) as redis:
        name = tier._keys.page(first)
        page = redis.get(name)
        assert isinstance(page, bytes)
        raw = bytearray(page)
        raw[HEADER_BYTES + 3] ^= 1
        redis.set(name, bytes(raw))
        redis.delete(tier._keys.page(second))
    found = command("fsck", "--data", tmp_path / "data")
    assert found.exit_code == 1
    assert "page 0 unreadable" in found.output
    assert "page 1" in found.output


def test_a_session_leaves_one_deployment_and_goes_on_in_another(
    command: Command,
    session: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: Any,
    say: Any,
) -> None:
    file = tmp_path / "s.kvs"
    exported = command("export", session, file, "--data", tmp_path / "data")
    assert exported.exit_code == 0, exported.output
    taken = command("import", file, "--data", tmp_path / "data")
    assert (taken.exit_code, "--as" in taken.output) == (2, True)

    async def answer(data: Path) -> str:
        async with running(data) as service:
            return str(await say(service, session, "What is the extension of Melnor?"))

    here = asyncio.run(answer(tmp_path / "data"))
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", uuid4().hex)
    imported = command("import", file, "--data", tmp_path / "elsewhere")
    assert imported.exit_code == 0, imported.output
    assert "missing" not in imported.output
    assert command("fsck", "--data", tmp_path / "elsewhere").exit_code == 0
    assert asyncio.run(answer(tmp_path / "elsewhere")) == here


def test_pages_of_a_deleted_session_expire_in_redis_and_a_repair_shortens_that(
    command: Command,
    session: str,
    tmp_path: Path,
    settings_of: Any,
    tier: RedisTier,
    redis_url: str,
) -> None:
    async def forget() -> None:
        catalog = await open_catalog(settings_of(tmp_path / "data"))
        await catalog.sessions.delete(session, None)
        await catalog.close()

    asyncio.run(forget())
    shutil.rmtree(tmp_path / "data" / "pages")
    found = command("fsck", "--data", tmp_path / "data")
    assert found.exit_code == 0, found.output
    assert EXPIRES in found.output
    names = [tier._keys.page(header.id) for header in tier.stored()]
    command("fsck", "--data", tmp_path / "data", "--repair")
    with closing(Redis.from_url(redis_url)) as redis:
        assert max(redis.ttl(name) for name in names) <= CONDEMNED_SECONDS


def test_a_repair_leaves_what_a_turn_elsewhere_may_be_about_to_commit(
    command: Command, session: str, tmp_path: Path, tier: RedisTier, redis_url: str
) -> None:
    some = next(tier.stored())
    (blob,) = tier.get([some.id])
    assert blob is not None
    young, old = make_random_id(), make_random_id()
    for page_id, age in ((young, 0), (old, 7200)):
        header = replace(some, id=page_id, written_at=int(time.time()) - age)
        tier.put([(page_id, seal(header, bytes(blob)[HEADER_BYTES:]))])
    command("fsck", "--data", tmp_path / "data", "--repair")
    with closing(Redis.from_url(redis_url)) as redis:
        lives = [redis.ttl(tier._keys.page(page_id)) for page_id in (young, old)]
    assert lives[1] <= CONDEMNED_SECONDS < lives[0]


def test_a_redis_that_does_not_answer_cannot_be_checked(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", "redis://127.0.0.1:1/0")
    found = command("fsck", "--data", tmp_path)
    assert (found.exit_code, "cannot be checked" in found.output) == (2, True)
