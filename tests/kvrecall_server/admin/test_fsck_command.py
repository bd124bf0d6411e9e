"""`kvrecall fsck` on directories that a real service has made, whole and damaged."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.page_ids import PageId, make_random_id
from kvrecall_server.admin.fsck import DEAD, HELD, MANY, NOT_REBUILT, REBUILT, SWEPT
from kvrecall_server.app.catalog import open_catalog
from kvstore.format.page import HEADER_BYTES, parse_header, seal
from kvstore.tiers.nvme.tier import NvmeTier

Command = Callable[..., Any]


@pytest.fixture
def check(command: Command, served: Any) -> Callable[..., Any]:
    """Run fsck on the test's directory; its exit code and what its output."""

    def run(*options: str) -> tuple[int, str]:
        found = command("fsck", "--data", served.data, *options)
        assert "Traceback" not in found.output
        return found.exit_code, found.output

    return run


@pytest.fixture
def tier(served: Any) -> Callable[[], NvmeTier]:
    """The directory's files, opened as a service would."""
    return lambda: NvmeTier(served.data / "pages")


def places(path: Path) -> dict[PageId, int]:
    """Offset of each page's last record in a segment file, in bytes."""
    raw = path.read_bytes()
    at = 0
    found = {}
    while at < len(raw):
        header = parse_header(raw, at)
        if header.payload_bytes:
            found[header.id] = at
        at += header.record_bytes
    return found


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_the_directory_of_a_stopped_service_is_clean(check: Any) -> None:
    code, output = check()
    assert code == 0
    assert "3 sessions" in output
    assert ": clean" in output


def test_a_check_changes_nothing(check: Any, pages_of: Any) -> None:
    before = [path.read_bytes() for path in pages_of()]
    flip(pages_of()[-1], 5)
    flip(pages_of()[-1], 5)
    check()
    assert [path.read_bytes() for path in pages_of()] == before


def test_a_flipped_bit_in_a_page_is_found_and_will_be_rebuilt(
    check: Any, served: Any, pages_of: Any, ids_of: Any
) -> None:
    first = ids_of(served.data, served.parent)[0]
    path = pages_of()[-1]
    flip(path, places(path)[first] + HEADER_BYTES + 99)
    code, output = check()
    assert code == 1
    # All of them begin with the same tokens.
    for session in (served.parent, served.child, served.orphan):
        assert f"session {session}" in output
    assert output.count("page 0 unreadable") == 3
    assert REBUILT in output


def test_a_flipped_bit_in_a_header_loses_its_page_alone(check: Any, pages_of: Any) -> None:
    path = pages_of()[-1]
    *_, before_last, _ = sorted(places(path).values())
    flip(path, before_last + 20)
    code, output = check()
    assert code == 1
    assert "no record can be read" in output
    assert "missing" in output
    assert "pages " not in output.partition("consequence")[2].partition("missing")[0]


def test_the_pages_of_a_missing_segment_are_missing(check: Any, served: Any, pages_of: Any) -> None:
    for path in pages_of():
        path.unlink()
    code, output = check()
    assert code == 1
    assert f"session {served.child}" in output
    assert "missing" in output
    assert REBUILT in output


def test_a_torn_end_is_a_note_and_no_problem(check: Any, pages_of: Any) -> None:
    with pages_of()[-1].open("ab") as file:
        file.write(b"KVRP half a record")
    code, output = check()
    assert code == 0
    assert "18 bytes at its end are torn" in output
    assert "1 to note" in output


async def forget(settings: Any, session: str) -> None:
    """Delete a session while no worker is there."""
    catalog = await open_catalog(settings)
    try:
        await catalog.sessions.delete(session, None)
    finally:
        await catalog.close()


def test_pages_of_a_deleted_session_are_a_note_until_they_are_deleted(
    check: Any, served: Any, tier: Any, ids_of: Any, settings_of: Any
) -> None:
    kept = {*ids_of(served.data, served.parent), *ids_of(served.data, served.child)}
    gone = set(ids_of(served.data, served.orphan)) - kept
    asyncio.run(forget(settings_of(served.data), served.orphan))
    code, output = check()
    assert code == 0
    assert f"{len(gone)} pages of no session" in output
    assert DEAD in output
    assert "deleted now" in check("--repair")[1]
    code, output = check()
    assert (code, "of no session" in output) == (0, False)
    with closing(tier()) as files:
        assert {header.id for header in files.stored()} == kept


@pytest.fixture
def leave_page(tier: Any) -> Callable[[], PageId]:
    """Write a page that no session has, as a turn that is not committed does."""

    def leave() -> PageId:
        with closing(tier()) as files:
            some = next(files.stored())
            (blob,) = files.get([some.id])
            page_id = make_random_id()
            files.put([(page_id, seal(replace(some, id=page_id), bytes(blob)[HEADER_BYTES:]))])
            files.flush()
        return page_id

    return leave


def test_uncommitted_pages_are_a_note(check: Any, leave_page: Any, tier: Any) -> None:
    page_id = leave_page()
    code, output = check()
    assert code == 0
    assert "1 page of no session" in output
    assert SWEPT in output
    check("--repair")
    with closing(tier()) as files:
        assert files.contains([page_id]) == [False]


def test_more_pages_of_no_session_than_a_sweep_deletes_are_a_problem_and_stay(
    check: Any, leave_page: Any, tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_id = leave_page()
    monkeypatch.setenv("KVRECALL_SERVICE__MAX_UNKNOWN_PAGES", "0")
    monkeypatch.setenv("KVRECALL_SERVICE__MAX_UNKNOWN_SHARE", "0")
    code, output = check("--repair")
    assert code == 1
    assert MANY in " ".join(output.split())
    with closing(tier()) as files:
        assert files.contains([page_id]) == [True]


def test_pages_newer_than_a_restored_catalog_are_a_note_and_can_be_deleted(
    check: Any, leave_page: Any, tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_id = leave_page()
    monkeypatch.setenv("KVRECALL_SERVICE__MAX_UNKNOWN_PAGES", "0")
    monkeypatch.setenv("KVRECALL_SERVICE__MAX_UNKNOWN_SHARE", "0")
    assert "--restored" in check()[1]
    code, output = check("--restored")
    assert code == 0
    assert HELD in " ".join(output.split())
    with closing(tier()) as files:
        assert files.contains([page_id]) == [True]
    code, output = check("--restored", "--repair")
    assert (code, "deleted now" in output) == (0, True)
    with closing(tier()) as files:
        assert files.contains([page_id]) == [False]
    assert check()[0] == 0


def test_pages_that_were_deleted_since_the_backup_are_a_note_and_damaged_ones_a_problem(
    check: Any, served: Any, pages_of: Any, ids_of: Any, tier: Any
) -> None:
    first, *_, last = ids_of(served.data, served.child)
    with closing(tier()) as files:
        files.delete([last])
        files.flush()
    assert check()[0] == 1
    code, output = check("--restored")
    assert (code, REBUILT in output) == (0, True)
    path = pages_of()[-1]
    flip(path, places(path)[first] + HEADER_BYTES + 99)
    code, output = check("--restored")
    assert (code, "page 0 unreadable" in output) == (1, True)


def test_rows_lost_with_an_incomplete_turn_log_cannot_be_rebuilt(
    check: Any, served: Any, pages_of: Any
) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("DELETE FROM turns WHERE session = ? AND number = 1", (served.parent,))
        catalog.commit()
    for path in pages_of():
        path.unlink()
    code, output = check()
    assert code == 1
    assert NOT_REBUILT in output
    assert REBUILT in output  # of the others


def test_what_cannot_be_checked_ends_with_2(
    check: Any, command: Command, served: Any, tmp_path: Path
) -> None:
    nothing = command("fsck", "--data", tmp_path / "nothing")
    assert nothing.exit_code == 2
    assert not (tmp_path / "nothing").exists()
    with closing(NvmeTier(served.data / "pages")):
        code, output = check()
    assert (code, "is used by a running process" in output) == (2, True)
    (served.data / "catalog.sqlite3").write_bytes(
        b"no database at all, but long enough to be looked at" * 40
    )
    code, output = check()
    assert (code, "cannot be read" in output) == (2, True)


def test_a_catalog_of_another_version_cannot_be_checked(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA user_version = 999")
    code, output = check()
    assert (code, "version 999" in output) == (2, True)


def test_a_damaged_catalog_is_reported_with_advice_to_restore_it(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA foreign_keys=OFF")
        catalog.execute("INSERT INTO worker_states VALUES ('no-such-session', x'00', x'00')")
        catalog.commit()
    code, output = check()
    assert code == 1
    assert "worker_states refers to nothing" in output
    assert "restore a backup" in output


def test_pages_alone_are_checked_where_a_gateway_has_the_catalog(check: Any, served: Any) -> None:
    for path in served.data.glob("catalog.sqlite3*"):
        path.unlink()
    code, output = check()
    assert code == 0
    assert "no catalog" in output


def test_a_changed_text_of_a_message_is_found(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as db, db:
        changed = db.execute("UPDATE turns SET messages = replace(messages, 'K4821', 'K4820')")
        assert changed.rowcount
    code, output = check()
    assert code != 0
    assert "do not match their checksum" in " ".join(output.split())
