"""Sessions in a store of rows and one of recurrent states."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrecall.domain.page_ids import ID_BYTES, PageId
from kvstore.errors import MissingPageError
from kvstore.format.encryption import KEY_BYTES
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.bucket_process import BucketProcess
from workers.engine.stored.stored_sessions import StoredSessions, build_state_layout

PAGE = 4
BYTES = 1003
LAYOUT = PageLayout(1, 1, 4, torch.float32, "f00d", PAGE)


def open_sessions(data: Path) -> StoredSessions:
    stores = [
        RowStore(layout, [RamTier(1 << 16), NvmeTier(data / name)])
        for name, layout in (("rows", LAYOUT), ("states", build_state_layout(BYTES, "f00d")))
    ]
    return StoredSessions(*stores)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[StoredSessions]:
    opened = open_sessions(tmp_path)
    yield opened
    opened.close()


def state(number: int) -> Tensor:
    return torch.full((BYTES,), number, dtype=torch.uint8)


def name_pages(name: str, pages: int) -> list[PageId]:
    return [f"{name} {number}".encode().ljust(ID_BYTES) for number in range(pages)]


def write(sessions: StoredSessions, name: str, pages: int, key: bytes = b"") -> list[int]:
    """Write a session with a state after each page; returns their positions."""
    sessions.open(name, [], [], key)
    for number, page in enumerate(name_pages(name, pages), 1):
        sessions.rows.append(name, torch.randn(LAYOUT.rows_shape(PAGE)), [page])
        sessions.append_state(name, page, state(number))
    assert sessions.begin_flush(name).result()
    return [PAGE * number for number in range(1, pages + 1)]


def read(sessions: StoredSessions, name: str, length: int, positions: list[int]) -> int:
    found = sessions.read_state(name, length, positions, BYTES)
    assert found.shape == (BYTES,)
    return int(found[0])


def test_rows_and_states_of_a_session_with_a_key_are_encrypted(tmp_path: Path) -> None:
    key = bytes(range(KEY_BYTES))
    first = open_sessions(tmp_path)
    positions = write(first, "a", 2, key)
    first.close()
    for name in ("rows", "states"):
        files = NvmeTier(tmp_path / name)
        headers = list(files.stored())
        files.close()
        assert [header.is_encrypted for header in headers] == [True, True]
    again = open_sessions(tmp_path)
    again.open("a", name_pages("a", 2), positions, key)
    assert read(again, "a", 2 * PAGE, positions) == 2
    again.close()


def test_the_state_after_the_sessions_rows_is_read_again(tmp_path: Path) -> None:
    first = open_sessions(tmp_path)
    positions = write(first, "a", 3)
    first.close()
    again = open_sessions(tmp_path)
    again.open("a", name_pages("a", 2), positions[:2])
    assert again.find_intact("a", positions[:2]) == (PAGE, 2 * PAGE)
    assert read(again, "a", 2 * PAGE, positions[:2]) == 2
    again.close()


def test_states_are_found_by_the_pages_that_they_follow(sessions: StoredSessions) -> None:
    write(sessions, "a", 3)
    sessions.drop_state("a", 1)
    sessions.begin_flush("a").result()
    pages = name_pages("a", 4)
    assert sessions.find_prefix(pages) == 3
    assert sessions.find_states(pages) == [PAGE, 3 * PAGE]


def test_a_fork_has_its_parents_states_and_its_own(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 3)
    shared = name_pages("a", 2)
    sessions.open("b", shared, positions[:2])
    assert read(sessions, "b", 2 * PAGE, positions[:2]) == 2
    own = name_pages("b", 2)
    sessions.rows.append("b", torch.randn(LAYOUT.rows_shape(2 * PAGE)), own)
    sessions.append_state("b", own[1], state(7))
    assert read(sessions, "b", 4 * PAGE, [*positions[:2], 4 * PAGE]) == 7
    assert read(sessions, "a", 3 * PAGE, positions) == 3


def test_a_state_that_another_open_session_has_stays(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 3)
    sessions.open("b", name_pages("a", 3), positions)
    sessions.drop_state("a", 2)
    assert read(sessions, "b", 3 * PAGE, positions) == 3
    with pytest.raises(MissingPageError):
        read(sessions, "a", 3 * PAGE, positions[:2])


def test_a_lost_state_is_restored(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 3)
    sessions.close_session("a")
    assert sessions.states is not None
    assert len(sessions.states.delete(name_pages("a", 3)[2:]).result()) == 1
    sessions.open("a", name_pages("a", 3), positions)
    assert sessions.find_intact("a", positions) == (PAGE, 2 * PAGE)
    sessions.restore_state("a", 2, state(5))
    assert sessions.find_intact("a", positions, verify=True) == tuple(positions)
    assert read(sessions, "a", 3 * PAGE, positions) == 5


def test_deleted_pages_leave_no_states(tmp_path: Path) -> None:
    first = open_sessions(tmp_path)
    write(first, "a", 2)
    write(first, "b", 1)
    first.close_session("a")
    assert len(first.delete(name_pages("a", 2)).result()) == 2
    first.close()
    again = open_sessions(tmp_path)
    assert again.list_pages() == set(name_pages("b", 1))
    assert len(again.delete(name_pages("b", 1)).result()) == 1
    assert again.list_pages() == set()
    again.close()


def test_tiers_of_states_have_names_of_their_own(sessions: StoredSessions) -> None:
    write(sessions, "a", 2)
    assert set(sessions.tiers()) == {"ram", "nvme", "states-ram", "states-nvme"}
    assert sessions.tiers()["states-nvme"].used_bytes > 2 * BYTES
    assert sessions.count_pending() == (0, 0)


def test_rows_and_states_that_moved_into_a_bucket_are_read_and_deleted(
    tmp_path: Path,
    bucket: BucketAddress,
    bucket_server: BucketProcess,
    until: Callable[..., None],
) -> None:
    stores = [
        RowStore(
            layout,
            [RamTier(1 << 16), NvmeTier(tmp_path / name)],
            bucket=BucketTier(bucket, layout),
            cold_after_seconds=0.2,
        )
        for name, layout in (("rows", LAYOUT), ("states", build_state_layout(BYTES, "f00d")))
    ]
    sessions = StoredSessions(*stores)
    positions = write(sessions, "a", 3)
    until(lambda: all(store.usage()["nvme"] == 0 for store in stores), "all of it moved")
    assert sessions.tiers()["states-bucket"].used_bytes > 3 * BYTES
    pages = name_pages("a", 3)
    sessions.open("a", pages, positions)
    assert sessions.find_intact("a", positions, verify=True) == tuple(positions)
    assert [read(sessions, "a", at, positions) for at in positions] == [1, 2, 3]
    assert sessions.find_prefix(pages) == 3
    assert sessions.find_states(pages) == positions
    assert sessions.list_pages() == set(pages)
    sessions.close_session("a")
    assert len(sessions.delete(pages).result()) == 3
    until(lambda: not bucket_server.list_objects(bucket), "rows and states are deleted")
    sessions.close()
