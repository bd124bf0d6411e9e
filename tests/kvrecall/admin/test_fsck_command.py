"""`kvrecall fsck` on directories that a real service has made, whole and damaged."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.admin.fsck import DROPPED, NOT_REBUILT, REBUILT
from kvstore.format.page import HEADER_BYTES, PageKey, parse_header, seal
from kvstore.tiers.nvme.tier import NvmeTier

Command = Callable[..., Any]


@pytest.fixture
def check(command: Command, served: Any) -> Callable[..., Any]:
    """Run fsck on the test's directory; its exit code and what it said."""

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
    """Where each page's newest record begins in a segment file."""
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
    """Turn one bit over."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_directory_as_a_service_has_left_it_is_clean(check: Any) -> None:
    code, said = check()
    assert code == 0
    assert "3 sessions" in said
    assert ": clean" in said


def test_nothing_is_changed_by_looking(check: Any, pages_of: Any) -> None:
    before = [path.read_bytes() for path in pages_of()]
    flip(pages_of()[-1], 5)
    flip(pages_of()[-1], 5)
    check()
    assert [path.read_bytes() for path in pages_of()] == before


def test_a_flipped_bit_in_a_page_is_found_and_said_to_be_rebuilt(
    check: Any, served: Any, pages_of: Any
) -> None:
    path = pages_of()[-1]
    flip(path, places(path)[PageKey(served.parent, 0)] + HEADER_BYTES + 99)
    code, said = check()
    assert code == 1
    assert f"session {served.parent}" in said
    assert f"page 0 written by {served.parent} unreadable" in said  # the fork shares it
    assert REBUILT in said


def test_a_flipped_bit_in_a_header_makes_what_is_older_suspect(
    check: Any, served: Any, pages_of: Any
) -> None:
    path = pages_of()[-1]
    last = max(places(path).values())
    flip(path, last + 20)
    code, said = check()
    assert code == 1
    assert "no record can be read" in said
    assert "may have superseded it" in said


def test_a_segment_that_is_gone_takes_its_pages_with_it(
    check: Any, served: Any, pages_of: Any
) -> None:
    for path in pages_of():
        path.unlink()
    code, said = check()
    assert code == 1
    assert f"session {served.child}" in said
    assert "missing" in said
    assert REBUILT in said


def test_an_end_that_was_torn_is_a_note_and_no_problem(check: Any, pages_of: Any) -> None:
    with pages_of()[-1].open("ab") as file:
        file.write(b"KVRP half a record")
    code, said = check()
    assert code == 0
    assert "18 bytes at its end are torn" in said
    assert "1 to note" in said


def test_pages_of_nobody_are_found_and_dropped_when_told_to(
    check: Any, served: Any, tier: Any
) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA foreign_keys=ON")
        catalog.execute("DELETE FROM sessions WHERE id = ?", (served.orphan,))
        catalog.execute("DELETE FROM retained_pages")
        catalog.commit()
    code, said = check()
    assert code == 1
    assert f"owner {served.orphan}" in said
    assert f"owner {served.deleted}" in said
    assert DROPPED in said
    assert "dropped now" in check("--repair")[1]
    code, said = check()
    assert (code, served.orphan in said) == (0, False)
    with closing(tier()) as files:
        assert {header.key.session for header in files.stored()} == {served.parent, served.child}


def test_pages_that_were_written_and_never_committed_are_a_note(
    check: Any, served: Any, tier: Any
) -> None:
    with closing(tier()) as files:
        newest = max(
            (header for header in files.stored(served.parent)), key=lambda header: header.key.index
        )
        (blob,) = files.get([newest.key])
        key = PageKey(served.parent, newest.key.index + 1)
        files.put([(key, seal(replace(newest, key=key), bytes(blob)[HEADER_BYTES:]))])
        files.flush()
    code, said = check()
    assert code == 0
    assert "written, never committed" in said


def test_a_turn_log_that_does_not_add_up_means_that_lost_rows_stay_lost(
    check: Any, served: Any, pages_of: Any
) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("DELETE FROM turns WHERE session = ? AND number = 1", (served.parent,))
        catalog.commit()
    for path in pages_of():
        path.unlink()
    code, said = check()
    assert code == 1
    assert NOT_REBUILT in said
    assert REBUILT in said  # of the others


def test_a_catalog_that_is_older_than_its_pages_is_not_to_be_served(
    check: Any, served: Any
) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("UPDATE sessions SET epoch = 0 WHERE id = ?", (served.child,))
        catalog.commit()
    code, said = check()
    assert code == 1
    assert "later epoch" in said
    assert "do not serve" in said


def test_what_cannot_be_checked_ends_with_2(
    check: Any, command: Command, served: Any, tmp_path: Path
) -> None:
    nothing = command("fsck", "--data", tmp_path / "nothing")
    assert nothing.exit_code == 2
    assert not (tmp_path / "nothing").exists()
    with closing(NvmeTier(served.data / "pages")):
        code, said = check()
    assert (code, "is used by a running process" in said) == (2, True)
    (served.data / "catalog.sqlite3").write_bytes(
        b"no database at all, but long enough to be looked at" * 40
    )
    code, said = check()
    assert (code, "cannot be read" in said) == (2, True)


def test_a_catalog_of_another_version_cannot_be_checked(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA user_version = 999")
    code, said = check()
    assert (code, "version 999" in said) == (2, True)


def test_a_damaged_catalog_is_said_to_be_the_truth(check: Any, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as catalog:
        catalog.execute("PRAGMA foreign_keys=OFF")
        catalog.execute("INSERT INTO worker_states VALUES ('nobody', x'00')")
        catalog.commit()
    code, said = check()
    assert code == 1
    assert "worker_states refers to nothing" in said
    assert "put back a copy" in said


def test_pages_alone_are_checked_where_a_gateway_has_the_catalog(check: Any, served: Any) -> None:
    for path in served.data.glob("catalog.sqlite3*"):
        path.unlink()
    code, said = check()
    assert code == 0
    assert "no catalog" in said
