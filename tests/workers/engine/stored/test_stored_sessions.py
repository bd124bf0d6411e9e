"""Sessions in a store of rows and one of recurrent states."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.errors import MissingPageError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
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


def write(sessions: StoredSessions, name: str, pages: int) -> list[int]:
    """Write a session with a state after each page; returns their positions."""
    sessions.open(pb.SessionSpec(session=name, epoch=1), 0, [])
    for number in range(1, pages + 1):
        sessions.rows.append(name, torch.randn(LAYOUT.rows_shape(PAGE)))
        sessions.append_state(name, state(number))
    assert sessions.begin_flush(name).result()
    return [PAGE * number for number in range(1, pages + 1)]


def read(sessions: StoredSessions, name: str, length: int, positions: list[int]) -> int:
    found = sessions.read_state(name, length, positions, BYTES)
    assert found.shape == (BYTES,)
    return int(found[0])


def test_the_state_after_the_sessions_rows_is_read_again(tmp_path: Path) -> None:
    first = open_sessions(tmp_path)
    positions = write(first, "a", 3)
    first.close()
    again = open_sessions(tmp_path)
    again.open(pb.SessionSpec(session="a", epoch=2), 2 * PAGE, positions[:2])
    assert again.find_intact("a", positions[:2]) == (PAGE, 2 * PAGE)
    assert read(again, "a", 2 * PAGE, positions[:2]) == 2
    again.close()


def test_what_was_not_committed_is_gone(sessions: StoredSessions) -> None:
    """A turn that was given up leaves no state: the next one writes its own in that place."""
    positions = write(sessions, "a", 3)
    sessions.open(pb.SessionSpec(session="a", epoch=2), PAGE, positions[:1])
    sessions.rows.append("a", torch.randn(LAYOUT.rows_shape(PAGE)))
    sessions.append_state("a", state(9))
    assert read(sessions, "a", 2 * PAGE, positions[:2]) == 9


def test_a_fork_has_its_parents_states_and_its_own(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 3)
    shared = [pb.SharedPages(owner="a", pages=2)]
    spec = pb.SessionSpec(session="b", epoch=1, shared=shared)
    sessions.fork("a", spec, 2 * PAGE, positions)
    assert read(sessions, "b", 2 * PAGE, positions[:2]) == 2
    sessions.rows.append("b", torch.randn(LAYOUT.rows_shape(2 * PAGE)))
    sessions.append_state("b", state(7))
    own = [*positions[:2], 4 * PAGE]
    assert read(sessions, "b", 4 * PAGE, own) == 7
    assert read(sessions, "a", 3 * PAGE, positions) == 3


def test_a_state_that_was_dropped_can_be_restored(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 3)
    sessions.drop_state("a", 2)
    assert sessions.find_intact("a", positions) == (PAGE, 2 * PAGE)
    with pytest.raises(MissingPageError):
        read(sessions, "a", 3 * PAGE, positions)
    sessions.restore_state("a", 2, state(5))
    assert sessions.find_intact("a", positions, verify=True) == tuple(positions)
    assert read(sessions, "a", 3 * PAGE, positions) == 5


def test_what_a_session_has_dropped_is_not_intact(sessions: StoredSessions) -> None:
    write(sessions, "a", 3)
    assert sessions.find_intact("a", [PAGE, 0, 3 * PAGE]) == (PAGE, 3 * PAGE)


def test_a_deleted_session_leaves_neither_rows_nor_states(tmp_path: Path) -> None:
    first = open_sessions(tmp_path)
    write(first, "a", 2)
    write(first, "b", 1)
    first.begin_delete("a").result()
    first.close()
    again = open_sessions(tmp_path)
    assert again.unclaimed("", None) == ["b"]
    assert again.delete_unclaimed("b")
    assert again.unclaimed("", None) == []
    again.close()


def test_pages_that_others_share_keep_their_states(sessions: StoredSessions) -> None:
    positions = write(sessions, "a", 2)
    spec = pb.SessionSpec(session="b", epoch=1, shared=[pb.SharedPages(owner="a", pages=2)])
    sessions.fork("a", spec, 2 * PAGE, positions)
    sessions.begin_delete("a", keep_pages=2).result()
    assert read(sessions, "b", 2 * PAGE, positions) == 2


def test_tiers_of_states_have_names_of_their_own(sessions: StoredSessions) -> None:
    write(sessions, "a", 2)
    assert set(sessions.tiers()) == {"ram", "nvme", "states-ram", "states-nvme"}
    assert sessions.tiers()["states-nvme"].used_bytes > 2 * BYTES
    assert sessions.count_pending() == (0, 0)
