"""Catalog files of older versions: migrated whole or not at all, and newer ones refused."""

import asyncio
import json
import re
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.commit_points import CommitPoint
from kvrecall.domain.errors import CatalogError, CatalogVersion
from kvrecall.domain.session import SharedPages
from services.catalog.records import IdempotencyKey, OrphanedPages
from services.catalog.sqlite.catalog import SqliteCatalog
from services.catalog.sqlite.migrate import get_backup_path
from services.catalog.sqlite.schema import MIGRATIONS, SCHEMA_VERSION

OLD_VERSION = 5
TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"


@pytest.fixture
def old_file(old_release: Any, tmp_path: Path) -> Path:
    """A catalog file of kvrecall 0.1.0, with some of each thing whose name has changed."""
    path = Path(shutil.copy(old_release.unpack_data(tmp_path) / "catalog.sqlite3", tmp_path))
    with closing(sqlite3.connect(path)) as file:
        file.executescript(
            """
            UPDATE repairs SET report = json_set(report, '$.cut', json('true')) WHERE number = 1;
            UPDATE turns SET outcome = json_set(outcome, '$.repairs_left_out', 3) WHERE number = 2;
            UPDATE calls SET said = 7 WHERE id = 'c2';
            INSERT INTO kept VALUES ('gone', 2);
            INSERT INTO leftovers VALUES ('gone', 2);
            INSERT INTO shares SELECT id, 'gone', 2, -1 FROM sessions WHERE turns = 2;
            """
        )
    return path


def read_rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(query).fetchall()


def read_version(path: Path) -> int:
    return int(read_rows(path, "PRAGMA user_version")[0][0])


def read_schema(path: Path) -> set[tuple[str, str]]:
    """Names and statements of tables and indexes, without spaces and quotes.

    SQLite's own table of sequences, once there, stays for good.
    """
    rows = read_rows(path, "SELECT name, sql FROM sqlite_master WHERE name <> 'sqlite_sequence'")
    return {(name, re.sub(r'--[^\n]*|[\s"]', "", sql or "")) for name, sql in rows}


async def open_and_close(path: Path) -> SqliteCatalog:
    catalog = await SqliteCatalog.open(path)
    await catalog.close()
    return catalog


async def test_the_sessions_of_an_older_file_are_all_there(old_file: Path) -> None:
    sessions = read_rows(old_file, "SELECT id, turns, length FROM sessions ORDER BY created_at, id")
    states = dict(read_rows(old_file, "SELECT session, state FROM worker_states"))
    outcomes = read_rows(old_file, "SELECT session, number, outcome FROM turns ORDER BY 1, 2")
    catalog = await SqliteCatalog.open(old_file)
    assert (catalog.upgrade.found, catalog.upgrade.version) == (OLD_VERSION, SCHEMA_VERSION)
    assert await catalog.sessions.get_ids() == [id for id, _, _ in sessions]
    for id, turns, length in sessions:
        session = await catalog.sessions.get(id)
        assert (session.turns, session.memory.length) == (turns, length)
        expected = (CommitPoint(0, length),) if length else ()
        assert await catalog.sessions.get_history(id) == expected
        assert await catalog.sessions.get_worker_state(id) == states[id]
    for id, number, text in outcomes:
        (turn,) = await catalog.turns.get_after(id, number - 1, 1)
        old = json.loads(text)
        reason = "appended" if old["finish_reason"] == "remembered" else old["finish_reason"]
        assert turn.outcome.finish_reason == reason
        assert turn.outcome.repairs_skipped == old["repairs_left_out"]
        assert turn.outcome.prompt_tokens == old["prompt_tokens"]
    await catalog.close()


async def test_calls_and_repairs_keep_what_was_stored_of_them(old_file: Path) -> None:
    ((paused, last_event_at),) = read_rows(
        old_file, "SELECT session, heard_at FROM calls WHERE id = 'c1'"
    )
    cut = [
        bool(cut)
        for (cut,) in read_rows(
            old_file, "SELECT json_extract(report, '$.cut') FROM repairs ORDER BY number DESC"
        )
    ]
    catalog = await SqliteCatalog.open(old_file)
    (waiting,) = (await catalog.sessions.get(paused)).calls
    assert (waiting.call.id, waiting.last_event_at) == ("c1", last_event_at)
    assert (waiting.started, waiting.output.joined) == (True, 1)
    assert await catalog.tool_calls.get_pieces(paused, waiting, 0, 9) == ("person: ",)
    assert (await catalog.tool_calls.get(paused, "c2")).consumed_in_turn == 7
    repairs = await catalog.repairs.get_latest(paused, 9)
    assert [record.report.truncated for record in repairs] == cut
    assert True in cut
    assert await catalog.tool_calls.get_idle_sessions(last_event_at) == [paused]
    await catalog.close()


async def test_page_references_keep_what_was_stored_of_them(old_file: Path) -> None:
    catalog = await SqliteCatalog.open(old_file)
    assert await catalog.page_refs.get_retained() == [SharedPages("gone", 2)]
    assert await catalog.page_refs.get_orphaned() == [OrphanedPages("gone", 2)]
    shared = [
        (await catalog.sessions.get(session)).shared for session in await catalog.sessions.get_ids()
    ]
    assert sum(map(len, shared)) == 1
    await catalog.close()


async def test_stored_responses_are_given_again(old_file: Path) -> None:
    query = "SELECT scope, key, fingerprint, answer FROM answers ORDER BY number"
    answers = read_rows(old_file, query)
    catalog = await SqliteCatalog.open(old_file)
    for scope, key, fingerprint, answer in answers:
        response = await catalog.idempotency.get(IdempotencyKey(scope, key, fingerprint))
        assert response is not None
        old = json.loads(answer)
        assert json.loads(response).get("id") == old.get("id")
        assert "repairs_left_out" not in json.loads(response)
    assert len(answers) == 4
    await catalog.close()


async def test_a_migrated_file_has_the_schema_of_a_new_one(old_file: Path, tmp_path: Path) -> None:
    await open_and_close(old_file)
    await open_and_close(tmp_path / "new.db")
    assert read_schema(old_file) == read_schema(tmp_path / "new.db")
    assert read_version(old_file) == read_version(tmp_path / "new.db") == SCHEMA_VERSION
    assert read_rows(old_file, "PRAGMA foreign_key_check") == []


async def test_a_migrated_file_takes_further_commits(
    old_file: Path, make_turn: Callable[..., Any]
) -> None:
    catalog = await SqliteCatalog.open(old_file)
    (paused,) = await catalog.tool_calls.get_idle_sessions(1e12)
    session = await catalog.sessions.get(paused)
    commit = make_turn(paused, session.turns + 1)
    await catalog.turns.commit(commit, session.epoch, None)
    assert (await catalog.sessions.get(paused)).calls == ()
    assert (await catalog.tool_calls.get(paused, "c1")).consumed_in_turn == session.turns + 1
    await catalog.close()


async def test_a_copy_from_before_lies_beside_the_file(old_file: Path) -> None:
    names = [name for (name,) in read_rows(old_file, TABLES)]
    before = [read_rows(old_file, f"SELECT * FROM {name}") for name in names]
    catalog = await open_and_close(old_file)
    backup = get_backup_path(old_file, OLD_VERSION)
    assert catalog.upgrade.backup == backup
    assert backup.name == "catalog.sqlite3.v5-backup"
    assert read_version(backup) == OLD_VERSION
    assert [read_rows(backup, f"SELECT * FROM {name}") for name in names] == before
    assert (await open_and_close(old_file)).upgrade.backup is None


async def test_a_new_file_and_a_current_one_are_not_upgraded(tmp_path: Path) -> None:
    new = (await open_and_close(tmp_path / "c.db")).upgrade
    again = (await open_and_close(tmp_path / "c.db")).upgrade
    assert (new.found, new.upgraded) == (None, False)
    assert (again.found, again.upgraded) == (SCHEMA_VERSION, False)
    assert (new.backup, again.backup) == (None, None)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, min(MIGRATIONS) - 1])
async def test_a_version_that_cannot_be_read_is_refused_and_left_alone(
    old_file: Path, version: int
) -> None:
    with closing(sqlite3.connect(old_file)) as file:
        file.execute(f"PRAGMA user_version = {version}")
    before = read_schema(old_file), read_rows(old_file, "SELECT * FROM turns")
    with pytest.raises(CatalogVersion) as caught:
        await SqliteCatalog.open(old_file)
    message = str(caught.value)
    for part in (str(old_file), f"version {version};", f"version {SCHEMA_VERSION} ", "Run the"):
        assert part in message
    assert (read_schema(old_file), read_rows(old_file, "SELECT * FROM turns")) == before
    assert read_version(old_file) == version


async def test_a_migration_that_fails_changes_nothing(old_file: Path) -> None:
    with closing(sqlite3.connect(old_file)) as file:
        file.execute("UPDATE turns SET outcome = '{' WHERE number = 3")
        file.commit()
    schema = read_schema(old_file)
    with pytest.raises(CatalogError, match="cannot be opened"):
        await SqliteCatalog.open(old_file)
    assert (read_version(old_file), read_schema(old_file)) == (OLD_VERSION, schema)
    with closing(sqlite3.connect(old_file)) as file:
        file.execute("UPDATE turns SET outcome = '{}' WHERE outcome = '{'")
        file.commit()
    await open_and_close(old_file)
    assert read_version(old_file) == SCHEMA_VERSION


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from services.catalog import renames

calls = 0
rename = renames.rename_in_outcome

def rename_in_outcome(outcome):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(outcome)

renames.rename_in_outcome = rename_in_outcome
from services.catalog.sqlite.catalog import SqliteCatalog
asyncio.run(SqliteCatalog.open(Path(sys.argv[1])))
"""


async def test_what_an_older_file_stores_counts_as_if_it_were_stored_now(old_file: Path) -> None:
    catalog = await SqliteCatalog.open(old_file)
    sums = """
        SELECT s.id, s.bytes, length(CAST(s.settings AS BLOB))
        + (SELECT ifnull(sum(length(CAST(messages AS BLOB)) + length(token_ids)
           + length(CAST(outcome AS BLOB)) + length(utterance_tokens)), 0)
           FROM turns WHERE session = s.id)
        + (SELECT length(state) FROM worker_states WHERE session = s.id) FROM sessions AS s
    """
    rows = read_rows(old_file, sums)
    assert rows
    assert all(counted >= least > 0 for _, counted, least in rows)
    for id, _, _ in rows:
        await catalog.sessions.delete(id, None)
    await catalog.close()
    assert read_rows(old_file, "SELECT * FROM tenants") == []


async def test_after_a_kill_in_the_middle_the_file_is_as_before_and_migrates(
    old_file: Path,
) -> None:
    schema = read_schema(old_file)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(old_file))
    assert await killed.wait() == -signal.SIGKILL
    assert (read_version(old_file), read_schema(old_file)) == (OLD_VERSION, schema)
    catalog = await open_and_close(old_file)
    assert catalog.upgrade.found == OLD_VERSION
    assert read_version(get_backup_path(old_file, OLD_VERSION)) == OLD_VERSION


async def test_of_two_that_open_a_file_at_once_one_migrates_and_the_other_is_refused(
    old_file: Path,
) -> None:
    opened = await asyncio.gather(
        *(SqliteCatalog.open(old_file) for _ in range(2)), return_exceptions=True
    )
    (catalog,) = [each for each in opened if isinstance(each, SqliteCatalog)]
    (refusal,) = [each for each in opened if isinstance(each, CatalogError)]
    assert "in use by another process" in refusal.message
    assert catalog.upgrade.found == OLD_VERSION
    await catalog.close()
    assert (await open_and_close(old_file)).upgrade.found == SCHEMA_VERSION


def test_each_version_since_the_oldest_has_a_migration() -> None:
    assert sorted(MIGRATIONS) == list(range(min(MIGRATIONS), SCHEMA_VERSION))
    for version, name in MIGRATIONS.items():
        assert name.startswith(f"{version + 1:04}_")
