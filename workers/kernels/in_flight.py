"""Memory of passes that the device may not have come to yet."""

from collections import deque

import torch

from workers.cache.transfers import Transfers


class InFlight:
    """Holds what each pass reads by its address, until the pass is over on the device.

    The host runs ahead of the device, so a page that it has dropped may be read yet.
    """

    def __init__(self, transfers: Transfers) -> None:
        """Begin without a pass."""
        self._transfers = transfers
        self._ended = deque[tuple[torch.cuda.Event | None, object]]()
        self._last: object = None

    def begin(self, memory: object) -> None:
        """Begin a pass that reads `memory`, and let go of that of passes which are over.

        That of the last pass is held until another one begins.
        """
        # All of the pass before has been queued by now.
        self._ended.append((self._transfers.mark(), self._last))
        self._last = memory
        while self._ended and self._transfers.is_past(self._ended[0][0]):
            self._ended.popleft()
