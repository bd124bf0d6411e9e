"""Group of several processes, over torch.distributed."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.failures import GroupLost, PeerFailed

_T = TypeVar("_T")
# Backends of ranks by the type of their devices. The host's values go by gloo in any case.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
# Ranks load a large model at different speeds.
_LOADING = timedelta(minutes=30)
# Rank 0 says something so often: a rank that is gone is noticed then.
_BEAT_SECONDS = 2.0


@dataclass(frozen=True)
class _Failure:
    """What a rank sends in place of a value when its step has failed."""

    error: Exception


class ProcessGroup:
    """The ranks that were started together, see `Group`.

    Tensors are exchanged where they are: between devices by the backend of their type, else by gloo.
    What the host says goes over a gloo group of its own. Every exchange of it, and the end of every
    step, is one and the same collective: a rank whose step failed is at the end of it, and the others
    learn that at whichever exchange they are. Only a pass through the model has collectives beside it.
    """

    beat_seconds = _BEAT_SECONDS

    def __init__(self, control: Any, on_lost: Callable[[str], None]) -> None:
        """Exchange the host's values over `control`, a group of torch.distributed."""
        self._control = control
        self._on_lost = on_lost
        self.count = dist.get_world_size()
        self.index = dist.get_rank()

    @classmethod
    def join(
        cls,
        device_type: str,
        patience_seconds: float,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> "ProcessGroup":
        """Join the group that the environment names, as torch's launcher sets it.

        A rank that does not answer within `patience_seconds` is gone; `on_lost` is called with the reason
        then, before GroupLost is raised. Raises RuntimeError for a type of
        device without a backend, and where ranks are missing.
        """
        if device_type not in _BACKENDS:
            raise RuntimeError(f"torch has no backend for ranks on {device_type}")
        dist.init_process_group(_BACKENDS[device_type], timeout=_LOADING)
        if device_type != "cpu":
            torch.accelerator.set_device_index(dist.get_node_local_rank())
        patience = timedelta(seconds=patience_seconds)
        return cls(dist.new_group(backend="gloo", timeout=patience), on_lost)

    def leave(self) -> None:
        """Leave the group, in order; afterwards no method is called."""
        dist.destroy_process_group()

    def meet(self) -> None:
        """Wait by the model's group, whose patience is that of loading."""
        dist.barrier()

    def gather(self, value: _T) -> list[_T]:
        """Gather pickled values. Raises PeerFailed and GroupLost."""
        return self._gather("gather", value)

    def lead(self, value: _T) -> _T:
        """Gather as well, so that a failure is learned of."""
        led: _T = self._gather("lead", value if self.index == 0 else None)[0]
        return led

    def some(self, flags: Sequence[bool]) -> list[bool]:
        """Gather the flags."""
        return [any(each) for each in zip(*self.gather(list(flags)), strict=True)]

    def mean(self, values: Tensor) -> Tensor:
        """Reduce on the tensors' device."""
        total = values.clone()
        self._reduce(total)
        return total / self.count

    def any(self, mask: Tensor) -> Tensor:
        """Count the ranks that have the bit."""
        counts = mask.to(torch.int32)
        self._reduce(counts)
        return counts > 0

    def sum_by_token(self, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the ranks' tokens and values, and add them up in the order of the ranks."""
        parts = self.gather((tokens.cpu(), values.cpu()))
        known, index = torch.unique(torch.cat([part for part, _ in parts]), return_inverse=True)
        total = torch.zeros(values.shape[0], len(known))
        total.index_add_(1, index, torch.cat([part for _, part in parts], 1).float())
        return known.to(tokens.device), total.to(values.device)

    def sum_own(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Find this rank's tokens among those of all."""
        known, total = self.sum_by_token(tokens, values)
        return total[:, torch.searchsorted(known, tokens)]

    def agree(self, error: Exception | None) -> Exception | None:
        """Exchange the failures. Raises GroupLost."""
        if isinstance(error, PeerFailed):
            return error.error
        end = None if error is None else _Failure(_make_portable(error))
        values = self._exchange("end", end)
        return error or _find_failure(values)

    def _gather(self, kind: str, value: Any) -> list[Any]:
        values = self._exchange(kind, value)
        if failed := _find_failure(values):
            raise PeerFailed(failed)
        return values

    def _reduce(self, tensor: Tensor) -> None:
        self.gather(None)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lose(str(error)) from error

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        """Exchange values at the same place of a step, or find a failure in place of one.

        Raises GroupLost, also where ranks are at different places.
        """
        values: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(values, (kind, value), group=self._control)
        except RuntimeError as error:
            raise self._lose(str(error)) from error
        if len({at for at, each in values if not isinstance(each, _Failure)}) > 1:
            raise self._lose("the ranks are out of step: they are at different places of a job")
        return [each for _, each in values]

    def _lose(self, reason: str) -> GroupLost:
        self._on_lost(reason)
        return GroupLost(reason)


def _find_failure(values: Sequence[Any]) -> Exception | None:
    """Return the error of the first rank that has failed."""
    return next((each.error for each in values if isinstance(each, _Failure)), None)


def _make_portable(error: Exception) -> Exception:
    """Return an error that can be sent: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries may refuse in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
