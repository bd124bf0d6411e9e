"""Which catalog a process opens.

The file in its data directory, or the Redis that several share.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvstore.settings import StoreSettings

SESSION = Session("s", 1, SessionSettings(64, 8, "snapkv"), 1.0, 1.0, 0, MemoryReport())


async def test_without_a_url_the_catalog_is_a_file_of_the_data_directory(tmp_path: Path) -> None:
    catalog = await open_catalog(Settings(data=tmp_path))
    await catalog.sessions.create(SESSION, b"", None)
    await catalog.close()
    assert (tmp_path / "catalog.sqlite3").exists()


async def test_processes_with_the_same_url_and_namespace_share_a_catalog(
    tmp_path: Path, redis_url: str
) -> None:
    here = StoreSettings(redis_namespace="deployment")
    settings = Settings(data=tmp_path, catalog_url=SecretStr(redis_url), store=here)
    one = await open_catalog(settings)
    other = await open_catalog(settings)
    elsewhere = await open_catalog(settings.model_copy(update={"store": StoreSettings()}))
    await one.sessions.create(SESSION, b"", None)
    assert await other.sessions.get("s") == SESSION
    assert await elsewhere.sessions.get_ids() == []
    await one.sessions.delete("s", None)
    for catalog in (one, other, elsewhere):
        await catalog.close()
    assert not (tmp_path / "catalog.sqlite3").exists()


async def test_sentinels_name_the_server(redis_behind_sentinels: tuple[Any, Any, str]) -> None:
    catalog = await open_catalog(Settings(catalog_url=SecretStr(redis_behind_sentinels[2])))
    await catalog.sessions.create(SESSION, b"", None)
    assert await catalog.sessions.get_ids() == ["s"]
    await catalog.close()


@pytest.mark.parametrize(
    "url", ["http://user:secret-word@host", "redis+sentinel://:secret-word@host:1"]
)
async def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(CannotServe, match="KVRECALL_CATALOG_URL") as caught:
        await open_catalog(Settings(catalog_url=SecretStr(url)))
    assert "secret-word" not in str(caught.value)


async def test_a_wrong_password_is_refused_without_saying_it(
    redis_process: Callable[..., Any],
) -> None:
    server = redis_process()
    server.client.config_set("requirepass", "right-word")
    url = SecretStr(f"redis://:wrong-word@127.0.0.1:{server.port}")
    with pytest.raises(CannotServe, match="Redis failed") as caught:
        await open_catalog(Settings(catalog_url=url))
    assert "-word" not in str(caught.value)


@pytest.fixture
def denying_url() -> Iterator[str]:
    """A server that says why it refuses a connection and closes it, as Redis in protected mode does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def deny() -> None:
            with suppress(OSError):  # closed at the end of the test
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"-DENIED Redis is running in protected mode\r\n")
                    connection.close()

        thread = threading.Thread(target=deny)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_what_a_server_says_to_a_connection_that_it_refuses_is_kept(denying_url: str) -> None:
    with pytest.raises(CannotServe, match="DENIED Redis is running in protected mode"):
        await open_catalog(Settings(catalog_url=SecretStr(denying_url)))
