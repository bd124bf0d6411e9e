"""Copies between the host and the model's device, beside the computation instead of within it.

On a GPU each direction has a stream of its own and goes through pinned memory: the write of new
rows waits for the pass that made them, but not for the passes that were queued since, and rows that
come in are copied while passes run. On a CPU nothing is copied that need not be.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # its streams and events are untyped


class Transfers:
    """Copies tensors off a device and onto it. Safe to call from several threads."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams, where the device has any; a worker has one object for all its copies."""
        self.device = device
        streams = device.type == "cuda" and torch.cuda.is_available()
        self._down: torch.cuda.Stream | None = _cuda.Stream(device) if streams else None
        self._up: torch.cuda.Stream | None = _cuda.Stream(device) if streams else None

    def mark(self) -> torch.cuda.Event | None:
        """Mark the end of all that is queued on the calling thread's stream; None on a CPU."""
        if self._down is None:
            return None
        event: torch.cuda.Event = _cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def is_past(self, mark: torch.cuda.Event | None) -> bool:
        """True if the device has come to a mark; the host does not wait."""
        if mark is None:
            return True
        event: Any = mark
        return bool(event.query())

    def to_host(self, tensor: Tensor, after: torch.cuda.Event | None) -> Tensor:
        """Copy a tensor to the host as it is at the mark `after`; waits for the copy alone.

        On a CPU the tensor itself, which may not be written to any more.
        """
        if self._down is None or after is None:
            return tensor.cpu()
        with torch.cuda.stream(self._down):
            self._down.wait_event(after)
            host = empty_pinned(tensor.shape, tensor.dtype)
            host.copy_(tensor, non_blocking=True)
            copied = _cuda.Event()
            copied.record(self._down)
        copied.synchronize()
        return host

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy tensors onto the device; what the caller queues next waits for them.

        The host does not wait. On a CPU the tensors themselves.
        """
        if self._up is None:
            return [each.to(self.device, non_blocking=True) for each in tensors]
        with torch.cuda.stream(self._up):
            copies = [each.to(self.device, non_blocking=True) for each in self.pin(tensors)]
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(self._up)
        for each in copies:
            # Its memory belongs to the other stream, which may not reuse it before this one is done.
            each.record_stream(stream)
        return copies

    def pin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in pinned memory, which the device reads where it lies, of the tensors that are not there.

        On a CPU the tensors themselves.
        """
        if self._up is None:
            return list(tensors)
        return [each if each.is_pinned() else each.pin_memory() for each in tensors]


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate host memory that a GPU copies to directly; torch keeps and reuses it."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
