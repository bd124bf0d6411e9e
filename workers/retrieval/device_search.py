"""Search of sessions' rows on the device, as far as its memory has the codes of their keys."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from workers.cache.transfers import Transfers
from workers.parallel.group import Group
from workers.retrieval.kernel_step import KernelStep
from workers.retrieval.retriever import Retriever
from workers.retrieval.sampling import ROTATIONS
from workers.retrieval.step import RetrievalStep

if TYPE_CHECKING:  # they need triton, which comes with torch for GPUs
    from workers.kernels.attention import KernelAttention
    from workers.kernels.device_codes import DeviceCodes
    from workers.kernels.in_flight import InFlight


class DeviceSearch:
    """What gives a pass the retrieval by kernels: codes on the device, and pages that it may read."""

    def __init__(
        self, kernels: "KernelAttention", codes: "DeviceCodes", in_flight: "InFlight"
    ) -> None:
        """Take the kernels, where they find codes, and what holds the pages that they read."""
        self._kernels = kernels
        self._codes = codes
        self._in_flight = in_flight

    @classmethod
    def open(cls, transfers: Transfers, limit_bytes: int, group: Group) -> "DeviceSearch | None":
        """Open it with so many bytes for codes; None without bytes, a GPU or triton.

        group: of the processes that have the other heads. Triton's interpreter stands for a GPU.
        """
        if not limit_bytes:
            return None
        try:
            from workers.kernels.attention import KernelAttention
            from workers.kernels.device_codes import DeviceCodes
            from workers.kernels.in_flight import InFlight
            from workers.kernels.operator import runs_on
        except ImportError:
            return None
        if not runs_on(transfers.device):
            return None
        kernels = KernelAttention(transfers, ROTATIONS, group)
        return cls(kernels, DeviceCodes(transfers, limit_bytes), InFlight(transfers))

    def begin(
        self, retrievers: Sequence[Retriever | None], otherwise: RetrievalStep
    ) -> KernelStep | None:
        """Begin a pass, one of whose sessions retrieves at least; None where a session's rows are not searched here.

        otherwise: the same pass by the host, for layers that kernels do not take.
        """
        some = [each for each in retrievers if each is not None]
        if not all(each.copy.is_coded for each in some):
            return None
        placed = self._codes.place([each.copy.codes for each in some])
        if placed is None:
            return None
        self._in_flight.begin([placed, *(tuple(each.copy.rows.pages) for each in some)])
        searched = [None if each is None else each.searched_rows(0) for each in retrievers]
        addresses = iter(each.addresses for each in placed)
        on_device = [
            None if each is None else replace(each, codes=next(addresses)) for each in searched
        ]
        return KernelStep(retrievers, self._kernels, self._kernels.describe(on_device), otherwise)
