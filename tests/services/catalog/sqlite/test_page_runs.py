"""The tree of page ids follows the sessions of a SQLite catalog."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.domain.errors import CatalogError, StaleEpoch
from kvrecall.domain.page_ids import join_ids, split_ids
from kvrecall.domain.sessions.session import Session
from services.catalog.page_tree import Run
from services.catalog.records import ForkCommit, TurnCommit
from services.catalog.sqlite.catalog import SqliteCatalog
from tests.services.catalog.page_chains import check_runs, name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


def check(path: Path, chains: dict[str, tuple[bytes, ...]]) -> None:
    """Check the runs in a file."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT id, parent, refs, pages FROM runs").fetchall()
        leaves = dict(db.execute("SELECT id, run FROM sessions WHERE run NOTNULL").fetchall())
    runs = {row[0]: Run(row[0], row[1], row[2], split_ids(row[3])) for row in rows}
    check_runs(runs, leaves, chains)


async def test_runs_follow_commits_forks_and_deletions(
    tmp_path: Path, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    chains: dict[str, tuple[bytes, ...]] = {}

    async def commit(session: str, number: int, *tokens: int) -> None:
        chains[session] = name_chain(tokens)
        turn = replace(make_turn(session, number), page_ids=join_ids(chains[session]))
        await catalog.turns.commit(turn, 1, None)
        check(path, chains)

    for session in "st":
        await catalog.sessions.create(make_session(session), b"", None)
    await commit("s", 1, 0, 0, 0)
    await commit("t", 1, 0, 0, 1)
    await commit("s", 2, 0, 0, 0, 1, 1)
    child = replace(await catalog.sessions.get("s"), id="child")
    chains["child"] = chains["s"][:2]
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b"", join_ids(chains["child"])), None)
    check(path, chains)
    for session in "st":
        await catalog.sessions.delete(session, None)
        del chains[session]
        check(path, chains)
    await catalog.close()


async def test_a_commit_that_is_refused_changes_no_run(
    tmp_path: Path, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    await catalog.sessions.create(make_session("s"), b"", None)
    chain = name_chain([0, 1])
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=join_ids(chain)), 1, None)
    longer = replace(make_turn("s", 2), page_ids=join_ids(name_chain([0, 1, 2])))
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit(longer, 9, None)
    with pytest.raises(CatalogError):
        await catalog.turns.commit(replace(longer, turn=make_turn("s", 1).turn), 1, None)
    check(path, {"s": chain})
    await catalog.close()
