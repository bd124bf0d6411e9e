"""Group of several processes, over torch.distributed."""

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.exchange import Exchange
from workers.parallel.failures import GroupLost, PeerFailed

_T = TypeVar("_T")
# Backends of ranks by the type of their devices. The host's values go by gloo in any case.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
# Ranks load a large model at different speeds.
_LOADING = timedelta(minutes=30)
# Rank 0 says something so often: a rank that is gone is noticed then.
_BEAT_SECONDS = 2.0


class ProcessGroup:
    """The ranks that were started together, see `Group`.

    Tensors are exchanged where they are: between devices by the backend of their type, else by gloo.
    What the host says goes over a gloo group of its own, by one and the same collective. Ranks count
    their steps, and a message names its step: a rank whose step failed is in a later one than the
    others, who learn so at whichever exchange they are, and it waits there for them. Only a pass
    through the model has collectives beside it.
    """

    beat_seconds = _BEAT_SECONDS

    def __init__(self, control: Any, on_lost: Callable[[str], None]) -> None:
        """Exchange the host's values over `control`, a group of torch.distributed."""
        self._exchange = Exchange(control)
        self._on_lost = on_lost
        self._step = 0
        self.count = dist.get_world_size()
        self.index = dist.get_rank()
        self.local = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

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
        return self._meet_at("gather", value)

    def lead(self, value: _T) -> _T:
        """Gather as well, so that a failure is learned of."""
        led: _T = self._meet_at("lead", value if self.index == 0 else None)[0]
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

    def agree(self, error: Exception | None) -> Exception | None:
        """Gather the errors. Raises PeerFailed and GroupLost."""
        return _find_error([error, *self._meet_at("agree", _make_portable(error))])

    def next_step(self) -> None:
        """Count it."""
        self._step += 1

    def end(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Gather the errors, in a step of its own. Raises GroupLost."""
        self._step += 1
        own = [None if isinstance(each, PeerFailed) else each for each in errors]
        said = self._meet_at("end", [_make_portable(each) for each in own])
        return [_find_error(step) for step in zip(own, *said, errors, strict=True)]

    def _reduce(self, tensor: Tensor) -> None:
        self.gather(None)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lose(str(error)) from error

    def _meet_at(self, kind: str, value: Any) -> list[Any]:
        """Exchange values with the ranks, all of which come here unless a step fails on one.

        Raises PeerFailed where one is a step ahead, and GroupLost, also where ranks are at different places.
        """
        while True:
            try:
                said = self._exchange.gather((self._step, kind, value))
            except RuntimeError as error:
                raise self._lose(str(error)) from error
            steps = [step for step, _, _ in said]
            if self._step < max(steps):
                raise PeerFailed
            if self._step == min(steps):
                break
        if len({place for _, place, _ in said}) > 1:
            raise self._lose("the ranks are out of step: they are at different places of a job")
        return [each for _, _, each in said]

    def _lose(self, reason: str) -> GroupLost:
        self._on_lost(reason)
        return GroupLost(reason)


def _find_error(errors: Iterable[Exception | None]) -> Exception | None:
    return next((each for each in errors if each is not None), None)


def _make_portable(error: Exception | None) -> Exception | None:
    """Return an error that can be sent: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries may refuse in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
