"""The tree of page ids and the dead pages follow the sessions of a SQLite catalog."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.domain.errors import CatalogError, StaleEpoch
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.sessions.session import Session
from services.catalog.records import TurnCommit
from services.catalog.sqlite.catalog import SqliteCatalog
from tests.services.catalog.page_chains import check_tree, name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


def check(path: Path, *chains: tuple[bytes, ...]) -> None:
    """Check the tree in a file."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT id, parent, refs FROM pages").fetchall()
    check_tree({id: (parent, refs) for id, parent, refs in rows}, chains)


async def test_a_commit_that_is_refused_changes_no_page(
    tmp_path: Path, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    await catalog.sessions.create(make_session("s"), b"", None)
    chain = name_chain([0, 1])
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=join_ids(chain)), 1, None)
    other = replace(make_turn("s", 2), page_ids=join_ids(name_chain([0, 2])))
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit(other, 9, None)
    with pytest.raises(CatalogError):
        await catalog.turns.commit(replace(other, turn=make_turn("s", 1).turn), 1, None)
    check(path, chain)
    assert await catalog.pages.get_dead(9) == []
    await catalog.close()
