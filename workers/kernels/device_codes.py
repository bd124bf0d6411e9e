"""Codes of keys on the device, within a bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from kvstore.index.key_codes import KeyCodes
from workers.cache.transfers import Transfers


@dataclass(frozen=True, eq=False)
class CodedPage:
    """Codes of one page, on the host and on the device."""

    host: Tensor
    device: Tensor


@dataclass(frozen=True, eq=False)
class PlacedCodes:
    """Codes of one session on the device.

    Attributes:
        source: `KeyCodes.addresses` that they were copied at: another tensor since, where pages have changed.
        pages: The codes, which sessions with the same pages have in common.
        addresses: Of the pages' codes on the device, int64 `[n_pages]`.
    """

    source: Tensor
    pages: tuple[CodedPage, ...]
    addresses: Tensor


class DeviceCodes:
    """Copies of sessions' codes on the device: of each page once, the least recently used session makes room."""

    def __init__(self, transfers: Transfers, limit_bytes: int) -> None:
        """Begin without codes; limit_bytes: of the device's memory, for all of them."""
        self._transfers = transfers
        self._limit_bytes = limit_bytes
        # The least recently used first.
        self._sessions = WeakKeyDictionary[KeyCodes, PlacedCodes]()
        # By the codes' address on the host, which a coded page keeps from being used for others.
        self._pages = WeakValueDictionary[int, CodedPage]()

    @property
    def used_bytes(self) -> int:
        """Bytes of all codes on the device."""
        return sum(page.device.nbytes for page in list(self._pages.values()))

    def place(self, wanted: Sequence[KeyCodes]) -> list[PlacedCodes] | None:
        """Copy what is missing of these sessions' codes; the host does not wait.

        None where they take more than the bound: nothing is copied or dropped then.
        """
        missing = any(not self._is_current(codes) for codes in wanted)
        if missing and not self._make_room(wanted):
            return None
        placed = [self._place(codes) for codes in wanted]
        for codes, each in zip(wanted, placed, strict=True):
            self._sessions.pop(codes, None)
            self._sessions[codes] = each
        return placed

    def _is_current(self, codes: KeyCodes) -> bool:
        placed = self._sessions.get(codes)
        return placed is not None and placed.source is codes.addresses

    def _place(self, codes: KeyCodes) -> PlacedCodes:
        if self._is_current(codes):
            return self._sessions[codes]
        found = [self._pages.get(page.data_ptr()) for page in codes.pages]
        pairs = zip(codes.pages, found, strict=True)
        missing = [host for host, known in pairs if known is None]
        copied = iter(self._transfers.to_device(missing))
        pages = list[CodedPage]()
        for host, known in zip(codes.pages, found, strict=True):
            page = CodedPage(host, next(copied)) if known is None else known
            self._pages[host.data_ptr()] = page
            pages.append(page)
        addresses = torch.tensor([page.device.data_ptr() for page in pages], dtype=torch.int64)
        return PlacedCodes(codes.addresses, tuple(pages), addresses)

    def _make_room(self, wanted: Sequence[KeyCodes]) -> bool:
        """Drop other sessions' codes until those that are wanted fit; False, and drop none, if they never do."""
        kept = {page.data_ptr(): page.nbytes for codes in wanted for page in codes.pages}
        if sum(kept.values()) > self._limit_bytes:
            return False
        others = [codes for codes in list(self._sessions) if codes not in set(wanted)]
        while others:
            # The last used ones stay for as long as they fit.
            placed = self._sessions.get(others[-1])
            if placed is not None:
                kept |= {page.host.data_ptr(): page.host.nbytes for page in placed.pages}
                if sum(kept.values()) > self._limit_bytes:
                    break
            others.pop()
        for codes in others:
            self._sessions.pop(codes, None)
        return True
