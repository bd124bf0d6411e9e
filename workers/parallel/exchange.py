"""Exchange of small Python values between the processes of one worker."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

# Bytes of a message of one collective. Decisions, sampled tokens and flags are shorter.
_MESSAGE = 512
_HEADER = 8
_FIRST = _MESSAGE - _HEADER


class Exchange:
    """Gathers a value of each rank, in one collective where all are short.

    Each token takes three exchanges. Torch's own gather of objects takes two collectives for each.
    """

    def __init__(self, control: Any) -> None:
        """Exchange over `control`, a group of torch.distributed whose tensors are on the host."""
        self._control = control
        count = dist.get_world_size(control)
        self._sent = torch.zeros(_MESSAGE, dtype=torch.uint8)
        self._received = torch.zeros(count, _MESSAGE, dtype=torch.uint8)

    def gather(self, value: Any) -> list[Any]:
        """Gather pickled values, in the order of the ranks. Raises RuntimeError if a rank is gone."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        _write(self._sent, len(data).to_bytes(_HEADER, "little") + data[:_FIRST])
        dist.all_gather(list(self._received), self._sent, group=self._control)
        messages = [each.numpy().tobytes() for each in self._received]
        sizes = [int.from_bytes(each[:_HEADER], "little") for each in messages]
        parts = [each[_HEADER : _HEADER + size] for each, size in zip(messages, sizes, strict=True)]
        if (rest := max(sizes) - _FIRST) > 0:
            ends = self._gather_rest(data[_FIRST:], rest)
            parts = [first + end for first, end in zip(parts, ends, strict=True)]
        # A value may be padded: pickle ignores what follows it.
        return [pickle.loads(part) for part in parts]

    def _gather_rest(self, data: bytes, size: int) -> list[bytes]:
        """Gather what a message has no room for, each padded to `size` bytes."""
        sent = torch.zeros(size, dtype=torch.uint8)
        _write(sent, data)
        received = torch.zeros(len(self._received), size, dtype=torch.uint8)
        dist.all_gather(list(received), sent, group=self._control)
        return [each.numpy().tobytes() for each in received]


def _write(tensor: torch.Tensor, data: bytes) -> None:
    tensor.numpy().data[: len(data)] = data
