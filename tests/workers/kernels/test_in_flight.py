"""Memory of passes, beside a device that lags behind."""

from typing import Any
from weakref import ref

import torch

from workers.cache.transfers import Transfers
from workers.kernels.in_flight import InFlight


class LaggingDevice(Transfers):
    """Stands for a device that comes to a mark when the test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks = self.reached = 0

    def mark(self) -> Any:
        self.marks += 1
        return self.marks

    def is_past(self, mark: Any) -> bool:
        return bool(mark <= self.reached)


class Page:
    """What a pass reads."""


def test_what_a_pass_reads_is_held_until_the_device_is_done_with_it() -> None:
    device = LaggingDevice()
    flying, pages = InFlight(device), [Page() for _ in range(3)]
    seen = [ref(page) for page in pages]
    flying.begin(pages.pop(0))
    flying.begin(pages.pop(0))
    flying.begin(pages.pop(0))
    assert all(each() is not None for each in seen)
    device.reached = 2
    flying.begin(None)
    assert [each() is None for each in seen] == [True, False, False]
    device.reached = 4
    flying.begin(None)
    assert all(each() is None for each in seen)


def test_on_a_cpu_nothing_is_in_flight_when_the_next_pass_begins() -> None:
    flying, page = InFlight(Transfers(torch.device("cpu"))), Page()
    seen = ref(page)
    flying.begin(page)
    del page
    assert seen() is not None
    flying.begin(None)
    assert seen() is None
