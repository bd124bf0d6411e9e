"""Stored responses: read until they expire, are deleted, or their session is."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.domain.errors import UnknownResponse, UnknownSession
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from services.catalog.base import Catalog
from services.catalog.responses import StoredResponse
from services.catalog.sqlite.catalog import SqliteCatalog

MakeSession = Callable[..., Session]
DAY = 86_400.0
RESPONSE = StoredResponse("resp_1", "ann", "s", 2, "a0", "b1", 1, '{"text": "Grüße"}')


@pytest.fixture
async def stored(catalog: Catalog, make_session: MakeSession) -> Catalog:
    """A catalog with a session and a response of it."""
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.responses.store(RESPONSE, DAY)
    return catalog


async def test_a_response_is_read_as_it_was_stored_and_the_last_of_its_id_counts(
    stored: Catalog,
) -> None:
    assert await stored.responses.get("resp_1", "ann") == RESPONSE
    other = replace(RESPONSE, body="{}", turn=3)
    await stored.responses.store(other, DAY)
    assert await stored.responses.get("resp_1", "ann") == other


async def test_a_deleted_response_is_unknown_and_its_session_stays(stored: Catalog) -> None:
    await stored.responses.delete("resp_1", "ann")
    for call in (stored.responses.get, stored.responses.delete):
        with pytest.raises(UnknownResponse, match="resp_1"):
            await call("resp_1", "ann")
    assert await stored.sessions.get_ids() == ["s"]


async def test_a_response_goes_with_its_session_and_none_is_stored_without_one(
    stored: Catalog,
) -> None:
    await stored.sessions.delete("s", None)
    with pytest.raises(UnknownResponse):
        await stored.responses.get("resp_1", "ann")
    with pytest.raises(UnknownSession):
        await stored.responses.store(RESPONSE, DAY)


async def test_another_tenants_response_is_unknown(stored: Catalog) -> None:
    for call in (stored.responses.get, stored.responses.delete):
        with pytest.raises(UnknownResponse, match="resp_1"):
            await call("resp_1", "ben")
    assert await stored.responses.get("resp_1", "ann") == RESPONSE


async def test_a_response_that_has_expired_is_unknown(stored: Catalog) -> None:
    await stored.responses.store(replace(RESPONSE, id="resp_2"), 0.001)
    await stored.responses.store(replace(RESPONSE, id="resp_3"), DAY)
    for _ in range(1000):
        try:
            await stored.responses.get("resp_2", "ann")
        except UnknownResponse:
            break
        await asyncio.sleep(0.005)
    else:
        raise AssertionError("it did not expire")
    with pytest.raises(UnknownResponse):
        await stored.responses.delete("resp_2", "ann")
    assert (await stored.responses.get("resp_3", "ann")).id == "resp_3"


async def test_each_stored_response_deletes_some_that_have_expired(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv")
    session = Session("s", 1, settings, 1.0, 1.0, 0, MemoryReport(budget=64))
    await catalog.sessions.create(session, b"", None)
    for number in range(3):
        await catalog.responses.store(replace(RESPONSE, id=f"old_{number}"), -1.0)
    await catalog.responses.store(RESPONSE, DAY)
    await catalog.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT id FROM responses").fetchall() == [("resp_1",)]
