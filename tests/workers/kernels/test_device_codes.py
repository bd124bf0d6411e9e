"""Codes of keys on the device, within a bound."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.domain.page_ids import PageId, make_random_id
from kvstore.format.page import PageLayout
from kvstore.index.key_codes import KeyCodes, SharedCodes, code_bytes
from workers.cache.transfers import Transfers
from workers.kernels.device_codes import DeviceCodes

LAYOUT = PageLayout(2, 1, 4, torch.float32, "made up", page_tokens=8)
PAGE = code_bytes(LAYOUT)


class Copying(Transfers):
    """To a device whose memory is another part of the host's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copied = 0

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.copied += len(tensors)
        return [each.clone() for each in tensors]


class Sessions:
    """Sessions that may have pages in common, and their codes on the host."""

    def __init__(self) -> None:
        self._shared = SharedCodes()
        self._made = 0

    def build(self, ids: Sequence[PageId | None]) -> KeyCodes:
        codes = KeyCodes(LAYOUT, self._shared)
        self.extend(codes, ids)
        return codes

    def extend(self, codes: KeyCodes, ids: Sequence[PageId | None]) -> None:
        random = torch.Generator().manual_seed(self._made)
        self._made += 1
        rows = torch.randn(len(ids), *LAYOUT.rows_shape(LAYOUT.page_tokens), generator=random)
        codes.append(ids, list(rows))


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def transfers() -> Copying:
    return Copying()


def make_ids(count: int) -> list[PageId | None]:
    return [make_random_id() for _ in range(count)]


def check_equal(codes: KeyCodes, device: DeviceCodes) -> None:
    """What is on the device is what the host has, at the addresses that are named."""
    placed = device.place([codes])
    assert placed is not None
    [one] = placed
    for host, page, address in zip(codes.pages, one.pages, one.addresses.tolist(), strict=True):
        assert torch.equal(host, page.device)
        assert address == page.device.data_ptr()


def test_codes_are_copied_once_and_those_of_new_pages_alone(
    sessions: Sessions, transfers: Copying
) -> None:
    device, codes = DeviceCodes(transfers, 10 * PAGE), sessions.build(make_ids(3))
    check_equal(codes, device)
    check_equal(codes, device)
    assert transfers.copied == 3
    sessions.extend(codes, make_ids(2))
    check_equal(codes, device)
    assert transfers.copied == 5
    assert device.used_bytes == 5 * PAGE


def test_a_page_that_has_changed_is_copied_again(sessions: Sessions, transfers: Copying) -> None:
    device, codes = DeviceCodes(transfers, 10 * PAGE), sessions.build([*make_ids(1), None])
    check_equal(codes, device)
    codes.truncate(1)
    sessions.extend(codes, [None])
    check_equal(codes, device)
    assert transfers.copied == 3
    assert device.used_bytes == 2 * PAGE


def test_pages_that_sessions_have_in_common_are_there_once(
    sessions: Sessions, transfers: Copying
) -> None:
    device, common = DeviceCodes(transfers, 6 * PAGE), make_ids(4)
    made = [sessions.build([*common, *make_ids(1)]) for _ in range(2)]
    assert device.place(made) is not None
    for each in made:
        check_equal(each, device)
    assert device.used_bytes == transfers.copied * PAGE == 6 * PAGE


def test_the_least_recently_used_session_makes_room(sessions: Sessions, transfers: Copying) -> None:
    device, made = DeviceCodes(transfers, 5 * PAGE), [sessions.build(make_ids(2)) for _ in range(3)]
    for each in (made[0], made[1], made[0], made[2]):
        check_equal(each, device)
    assert transfers.copied == 6
    check_equal(made[0], device)
    assert transfers.copied == 6
    check_equal(made[1], device)
    assert transfers.copied == 8


def test_sessions_that_do_not_fit_together_are_refused_and_nothing_is_dropped(
    sessions: Sessions, transfers: Copying
) -> None:
    device, made = DeviceCodes(transfers, 5 * PAGE), [sessions.build(make_ids(3)) for _ in range(2)]
    check_equal(made[0], device)
    assert device.place(made) is None
    check_equal(made[0], device)
    assert transfers.copied == 3
    assert device.place([sessions.build(make_ids(6))]) is None


def test_codes_of_a_session_that_is_gone_are_too(sessions: Sessions, transfers: Copying) -> None:
    device, codes = DeviceCodes(transfers, 5 * PAGE), sessions.build(make_ids(3))
    check_equal(codes, device)
    del codes
    assert device.used_bytes == 0


@given(data=st.data(), room=st.integers(1, 8))
def test_codes_never_take_more_than_the_bound(data: st.DataObject, room: int) -> None:
    """Sessions grow, are cut and are searched together, in any order; some pages are common."""
    sessions, transfers, common = Sessions(), Copying(), make_ids(3)
    device, made = DeviceCodes(transfers, room * PAGE), [sessions.build([]) for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        codes = data.draw(st.sampled_from(made))
        if data.draw(st.booleans()):
            at = len(codes)
            grown = [*common[at : at + 1], *make_ids(data.draw(st.integers(0, 2)))]
            sessions.extend(codes, grown)
        else:
            codes.truncate(data.draw(st.integers(0, len(codes))))
        wanted = data.draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
        pages = {page.data_ptr() for each in wanted for page in each.pages}
        placed = device.place(wanted)
        assert (placed is None) == (len(pages) > room)
        if placed is not None:
            for each in wanted:
                check_equal(each, device)
        assert device.used_bytes <= room * PAGE
