"""`kvrecall fsck` on directories that a real service has made, whole and damaged."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.admin.fsck import DELETED, NOT_REBUILT, REBUILT
from kvstore.format.page import HEADER_BYTES, PageKey, parse_header, seal
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


def places(path: Path) -> dict[PageKey, int]:
    """Offset of each page's newest record in a segment file, in bytes."""
    raw = path.read_bytes()
    at = 0
    found = {}
    while at < len(raw):
        header = parse_header(raw, at)
        if header.payload_bytes:
            found[header.key] = at
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
    check: Any, served: Any, pages_of: Any
) -> None:
    path = pages_of()[-1]
    flip(path, places(path)[PageKey(served.parent, 0)] + HEADER_BYTES + 99)
    code, output = check()
    assert code == 1
    assert f"session {served.parent}" in output
    assert f"page 0 written by {served.parent} unreadable" in output  # the fork shares it
    assert REBUILT in output


def test_a_flipped_bit_in_a_header_makes_what_is_older_suspect(
    check: Any, served: Any, pages_of: Any
) -> None:
    path = pages_of()[-1]
    last = max(places(path).values())
    flip(path, last + 20)
    code, output = check()
    assert code == 1
    assert "no record can be read" in output
    assert "may have superseded it" in output


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


def test_orphaned_pages_are_found_and_deleted_with_repair(
    check: Any, served: Any, tier: Any
) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA foreign_keys=ON")
        catalog.execute("DELETE FROM sessions WHERE id = ?", (served.orphan,))
        catalog.execute("DELETE FROM retained_pages")
        catalog.commit()
    code, output = check()
    assert code == 1
    assert f"owner {served.orphan}" in output
    assert f"owner {served.deleted}" in output
    assert DELETED in output
    assert "deleted now" in check("--repair")[1]
    code, output = check()
    assert (code, served.orphan in output) == (0, False)
    with closing(tier()) as files:
        assert {header.key.session for header in files.stored()} == {served.parent, served.child}


def test_uncommitted_pages_are_a_note(check: Any, served: Any, tier: Any) -> None:
    with closing(tier()) as files:
        newest = max(
            (header for header in files.stored(served.parent)), key=lambda header: header.key.index
        )
        (blob,) = files.get([newest.key])
        key = PageKey(served.parent, newest.key.index + 1)
        files.put([(key, seal(replace(newest, key=key), bytes(blob)[HEADER_BYTES:]))])
        files.flush()
    code, output = check()
    assert code == 0
    assert "written but not committed" in output


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


def test_a_catalog_older_than_its_pages_must_not_be_served(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("UPDATE sessions SET epoch = 0 WHERE id = ?", (served.child,))
        catalog.commit()
    code, output = check()
    assert code == 1
    assert "later epoch" in output
    assert "do not serve" in output


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
