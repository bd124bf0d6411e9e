"""The tree of page ids in the SQLite catalog. The functions run in the caller's transaction."""

import sqlite3
from collections.abc import Sequence

from kvrecall.domain.page_ids import join_ids, split_ids
from services.catalog import page_tree
from services.catalog.page_tree import SESSIONS_FOUND, Run
from services.catalog.records import KnownPrefix
from services.catalog.sqlite.storage.queries import fetch_all, fetch_one

# The most runs behind a prefix that are searched for sessions. Each has one, or some run behind it has.
_RUNS_SEARCHED = 256


class SqliteRuns:
    """`services.catalog.page_tree.Runs` in the table `runs`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def find(self, first: bytes) -> Run | None:
        """Return the run that begins with a page."""
        query = "SELECT id, parent, refs, pages FROM runs WHERE first = :first"
        row = fetch_one(self._db, query, {"first": first})
        return None if row is None else _to_run(row)

    def get(self, run_id: int) -> Run:
        """Return a run that exists."""
        query = "SELECT id, parent, refs, pages FROM runs WHERE id = :id"
        row = fetch_one(self._db, query, {"id": run_id})
        assert row is not None, "runs that are referenced exist"
        return _to_run(row)

    def add(self, parent: int | None, refs: int, pages: Sequence[bytes]) -> int:
        """Add a run under an id that no run has."""
        added = self._db.execute(
            "INSERT INTO runs (first, parent, refs, pages) VALUES (:first, :parent, :refs, :pages)",
            {"first": pages[0], "parent": parent, "refs": refs, "pages": join_ids(pages)},
        )
        assert added.lastrowid is not None, "an INSERT has a row id"
        return added.lastrowid

    def put(self, run: Run) -> None:
        """Replace the run of this id."""
        self._db.execute(
            "UPDATE runs SET first = :first, parent = :parent, refs = :refs, pages = :pages"
            " WHERE id = :id",
            {
                "id": run.id,
                "first": run.pages[0],
                "parent": run.parent,
                "refs": run.refs,
                "pages": join_ids(run.pages),
            },
        )

    def remove(self, run_id: int) -> None:
        """Remove a run."""
        self._db.execute("DELETE FROM runs WHERE id = :id", {"id": run_id})


def set_pages(db: sqlite3.Connection, session_id: str, page_ids: bytes) -> None:
    """Let a session have exactly these pages."""
    row = fetch_one(db, "SELECT run FROM sessions WHERE id = :session", {"session": session_id})
    before = None if row is None else row["run"]
    run, _ = page_tree.extend(SqliteRuns(db), before, split_ids(page_ids))
    if run != before:
        db.execute(
            "UPDATE sessions SET run = :run WHERE id = :session",
            {"run": run, "session": session_id},
        )


def drop_pages(db: sqlite3.Connection, run: int | None) -> None:
    """Forget a deleted session that ended with this run."""
    page_tree.drop(SqliteRuns(db), run)


def find_prefix(db: sqlite3.Connection, page_ids: bytes) -> KnownPrefix:
    """Find sessions that begin with the most of these pages."""
    run, pages = page_tree.find(SqliteRuns(db), split_ids(page_ids))
    query = (
        "WITH RECURSIVE behind (run) AS (SELECT :run UNION ALL"
        " SELECT id FROM runs JOIN behind ON parent = behind.run LIMIT :runs)"
        " SELECT id FROM behind CROSS JOIN sessions USING (run) LIMIT :sessions"
    )
    values = {"run": run, "runs": _RUNS_SEARCHED, "sessions": SESSIONS_FOUND}
    return KnownPrefix(pages, tuple(row["id"] for row in fetch_all(db, query, values)))


def _to_run(row: sqlite3.Row) -> Run:
    return Run(row["id"], row["parent"], row["refs"], split_ids(row["pages"]))
