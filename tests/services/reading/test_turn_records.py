"""The log with the positions of its tokens."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.testing import open_catalog
from services.catalog.base import Catalog
from services.catalog.records import SessionDump
from services.reading.turn_records import find_turns, read_turns

SETTINGS = SessionSettings(budget=64, repair_rows=0, method="snapkv")


async def add_turns(catalog: Catalog, sizes: list[int]) -> Session:
    """A session with turns of so many tokens."""
    turns = []
    stop = 0
    for number, size in enumerate(sizes, 1):
        stop += size
        memory = MemoryReport(length=stop)
        outcome = TurnOutcome("s", number, None, "appended", size, 0, memory, (), {}, stop=stop)
        ids = tuple(range(stop - size, stop))
        turns.append(Turn("s", number, (Message("user", "x"),), ids, outcome, (size,)))
    session = Session("s", 1, SETTINGS, 1.0, 1.0, len(turns), MemoryReport(length=stop))
    await catalog.sessions.restore(SessionDump(session, b"", tuple(turns)))
    return await catalog.sessions.get("s")


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=150),
    data=st.data(),
)
async def test_any_tokens_are_found_with_their_turns(sizes: list[int], data: Any) -> None:
    length = sum(sizes)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    async with open_catalog() as catalog:
        found = await find_turns(catalog, await add_turns(catalog, sizes), start, stop)
    ids = [token for record in found for token in record.turn.token_ids]
    assert ids == list(range(found[0].start, found[-1].stop))
    assert found[0].start <= start < found[0].stop
    assert found[-1].start < stop <= found[-1].stop
    for record in found:
        assert record.turn.token_ids == tuple(range(record.start, record.stop))


async def test_pages_of_the_log_have_the_positions_of_their_tokens() -> None:
    async with open_catalog() as catalog:
        await add_turns(catalog, [3, 1, 4, 1, 5])
        found = [await read_turns(catalog, "s", after, 2) for after in (0, 2, 4, 5)]
    assert [[(each.start, each.stop) for each in page] for page in found] == [
        [(0, 3), (3, 4)],
        [(4, 8), (8, 9)],
        [(9, 14)],
        [],
    ]


async def test_a_session_that_was_deleted_meanwhile_is_unknown() -> None:
    async with open_catalog() as catalog:
        longer = replace(await add_turns(catalog, [3, 1, 4]), turns=90)
        with pytest.raises(UnknownSession):
            await find_turns(catalog, longer, 0, 8)
