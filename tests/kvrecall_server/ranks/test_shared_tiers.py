"""Ranks over Redis and over a bucket: each finds its own rows there, and no other's."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from structlog.testing import capture_logs

from kvrecall_server.app.rank_storage import list_ranks
from tests.bucket_process import BucketProcess

Command = Callable[..., Any]
REBUILT = "pages rebuilt"


def count_rebuilt(logs: list[Any]) -> int:
    """Count the pages that were computed again."""
    return sum(len(log["pages"]) for log in logs if log["event"] == REBUILT)


def delete_files(data: Path) -> None:
    """Delete the rows of both ranks."""
    for rank in list_ranks(2):
        for segment in (rank.find_folder(data) / "pages").glob("segment-*"):
            segment.unlink()


@pytest.fixture
def namespace(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Keys of the test's own."""
    name = uuid4().hex
    monkeypatch.setenv("KVRECALL_STORE__REDIS_URL", redis_url)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", name)
    return name


def read_pages(redis_url: str, namespace: str) -> dict[bytes, bytes]:
    """Read the pages of a namespace by their ids."""
    found = dict[bytes, bytes]()
    with closing(Redis.from_url(redis_url)) as redis:
        for name in redis.scan_iter(f"{namespace}:*:p:*", count=1000):
            page = redis.get(name)
            assert isinstance(page, bytes)
            found[name.rpartition(b":")[2]] = page
    return found


def test_a_worker_on_an_empty_folder_finds_its_rows_in_redis(
    command: Command,
    serve: Any,
    answer: Any,
    reply: Any,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    session = serve(data)
    first, second = (read_pages(redis_url, f"{namespace}-{rank.name}") for rank in list_ranks(2))
    assert first
    assert first.keys() == second.keys()
    assert all(first[page] != second[page] for page in first), "of other heads"
    assert read_pages(redis_url, namespace) == {}
    checked = command("fsck", "--data", data, "--tensor-parallel", 2)
    assert checked.exit_code == 0, checked.output
    assert f"redis of rank 1: {len(second)} pages" in checked.output
    expected = reply(data, session)
    delete_files(data)
    with capture_logs() as logs:
        assert answer(data, session) == expected
    assert count_rebuilt(logs) == 0


def test_a_rank_whose_rows_are_gone_does_not_take_another_s(
    serve: Any, answer: Any, reply: Any, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    session = serve(data)
    expected = reply(data, session)
    delete_files(data)
    with closing(Redis.from_url(redis_url)) as redis:
        redis.delete(*redis.scan_iter(f"{namespace}-rank-1-of-2:*", count=1000))
    with capture_logs() as logs:
        assert answer(data, session) == expected
    assert count_rebuilt(logs) > 0


def test_a_worker_on_an_empty_folder_finds_its_rows_in_a_bucket(
    command: Command,
    serve: Any,
    answer: Any,
    reply: Any,
    running: Any,
    ids_of: Any,
    bucket_server: BucketProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    until: Any,
) -> None:
    data = tmp_path / "data"
    address = bucket_server.create_bucket(monkeypatch)
    session = serve(data)
    expected = reply(data, session)
    monkeypatch.setenv("KVRECALL_STORE__COLD_URL", str(address))
    monkeypatch.setenv("KVRECALL_STORE__COLD_ENDPOINT", bucket_server.url)
    pages = {page_id.hex() for page_id in ids_of(data, session)}
    names = {f"kvrecall/{rank.name}/" for rank in list_ranks(2)}

    def has_moved() -> bool:
        objects = bucket_server.list_objects(address)
        assert all(any(each.startswith(name) for name in names) for each in objects)
        return all(
            pages <= {each[-32:] for each in objects if each.startswith(name)} for name in names
        )

    async def sleep() -> None:
        async with running(data):
            await asyncio.to_thread(until, has_moved, "the pages of both ranks moved")

    with monkeypatch.context() as variables:
        variables.setenv("KVRECALL_STORE__COLD_AFTER_SECONDS", "0.2")
        asyncio.run(sleep())
    delete_files(data)
    checked = command("fsck", "--data", data, "--tensor-parallel", 2)
    assert checked.exit_code == 0, checked.output
    assert f"bucket of rank 1: {len(pages)} pages" in checked.output
    with capture_logs() as logs:
        assert answer(data, session) == expected
    assert count_rebuilt(logs) == 0
