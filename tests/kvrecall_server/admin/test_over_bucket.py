"""A service whose sleeping sessions lie in a bucket: turns, fsck, export and import."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import ServiceError
from kvstore.tiers.bucket.address import BucketAddress
from tests.bucket_process import BucketProcess

Command = Callable[..., Any]
QUESTION = "What is the extension of Melnor?"
# Of a turn, which fails at once for some seconds after the bucket was silent.
ATTEMPTS = 300


@pytest.fixture
def server(bucket_process: BucketProcess) -> BucketProcess:
    """A server that a test may stop."""
    return bucket_process


@pytest.fixture
def address(server: BucketProcess, monkeypatch: pytest.MonkeyPatch) -> BucketAddress:
    """The bucket of every service and command of the test."""
    address = server.create_bucket(monkeypatch)
    monkeypatch.setenv("KVRECALL_STORE__COLD_URL", str(address))
    monkeypatch.setenv("KVRECALL_STORE__COLD_ENDPOINT", server.url)
    return address


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_one: Any, answer: Any) -> str:
    """What the session of `tmp_path / "data"` answers where no page has moved; the name of it is in a file."""
    name = serve_one(tmp_path / "data")
    (tmp_path / "session").write_text(name)
    shutil.copytree(tmp_path / "data", tmp_path / "warm")
    return str(answer(tmp_path / "warm", name))


@pytest.fixture
def answer(running: Any, say: Any) -> Callable[[Path, str], str]:
    """Runs a service over a directory for one turn; returns the reply."""

    async def run(data: Path, session: str) -> str:
        async with running(data) as service:
            return str(await say(service, session, QUESTION))

    return lambda data, session: asyncio.run(run(data, session))


@pytest.fixture
def session(
    expected: str,
    address: BucketAddress,
    server: BucketProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: Any,
    ids_of: Any,
    until: Callable[..., None],
) -> str:
    """The same session, whose pages a service has moved: its files are gone."""
    name = (tmp_path / "session").read_text()
    data = tmp_path / "data"
    pages = {page_id.hex() for page_id in ids_of(data, name)}

    async def sleep() -> None:
        async with running(data):
            await asyncio.to_thread(
                until,
                lambda: pages <= {name[-32:] for name in server.list_objects(address)},
                "the pages moved",
            )

    with monkeypatch.context() as variables:
        variables.setenv("KVRECALL_STORE__COLD_AFTER_SECONDS", "0.2")
        asyncio.run(sleep())
    for segment in (data / "pages").glob("segment-*"):
        segment.unlink()
    return name


def test_a_session_goes_on_from_the_bucket_as_it_would_have(
    command: Command, session: str, tmp_path: Path, expected: str, answer: Any
) -> None:
    found = command("fsck", "--data", tmp_path / "data")
    assert found.exit_code == 0, found.output
    assert "bucket: " in found.output
    assert answer(tmp_path / "data", session) == expected


def test_a_cold_session_is_exported_with_its_pages(
    command: Command,
    session: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: str,
    answer: Any,
) -> None:
    file = tmp_path / "s.kvs"
    exported = command("export", session, file, "--data", tmp_path / "data")
    assert exported.exit_code == 0, exported.output
    assert "missing" not in exported.output
    monkeypatch.delenv("KVRECALL_STORE__COLD_URL")
    imported = command("import", file, "--data", tmp_path / "elsewhere")
    assert imported.exit_code == 0, imported.output
    assert "missing" not in imported.output
    assert answer(tmp_path / "elsewhere", session) == expected


def test_fsck_finds_what_a_bucket_lost(
    command: Command,
    session: str,
    tmp_path: Path,
    server: BucketProcess,
    address: BucketAddress,
    ids_of: Any,
) -> None:
    first, second, *_ = (page_id.hex() for page_id in ids_of(tmp_path / "data", session))
    names = {name.rpartition("/")[2]: name for name in server.list_objects(address)}
    server.write_object(address, names[first], b"damaged")
    server.delete_object(address, names[second])
    found = command("fsck", "--data", tmp_path / "data")
    assert found.exit_code == 1
    assert "page 0 unreadable" in found.output
    assert "page 1 missing" in found.output


def test_a_lost_bucket_costs_a_recomputation(
    session: str,
    tmp_path: Path,
    server: BucketProcess,
    address: BucketAddress,
    expected: str,
    answer: Any,
) -> None:
    server.delete_bucket(address)
    assert answer(tmp_path / "data", session) == expected


def test_a_turn_of_a_cold_session_fails_while_the_bucket_is_silent_and_is_right_later(
    session: str, tmp_path: Path, server: BucketProcess, expected: str, running: Any, say: Any
) -> None:
    async def ask() -> str:
        async with running(tmp_path / "data") as service:
            server.stop()
            with pytest.raises(ServiceError) as failed:
                await say(service, session, QUESTION)
            assert failed.value.code is ErrorCode.STORAGE_FAILED
            server.go_on()
            for _ in range(ATTEMPTS):
                with suppress(ServiceError):
                    return str(await say(service, session, QUESTION))
                await asyncio.sleep(0.2)
            return "no answer"

    assert asyncio.run(ask()) == expected


def test_deleting_a_session_empties_the_bucket(
    session: str,
    tmp_path: Path,
    server: BucketProcess,
    address: BucketAddress,
    running: Any,
    until: Callable[..., None],
) -> None:
    async def delete() -> None:
        async with running(tmp_path / "data") as service:
            await service.delete(session)
            await asyncio.to_thread(
                until, lambda: not server.list_objects(address), "the objects are gone"
            )

    asyncio.run(delete())


def test_a_missing_bucket_is_named_by_the_doctor(
    command: Command, address: BucketAddress, server: BucketProcess, tmp_path: Path
) -> None:
    assert f"{address} answers" in " ".join(command("doctor", "--data", tmp_path).output.split())
    server.delete_bucket(address)
    assert "NoSuchBucket" in command("doctor", "--data", tmp_path).output
