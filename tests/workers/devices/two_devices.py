"""Devices that this machine lacks: tensors compute on the CPU, but each says that it lies on one of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HOST = torch.device("cpu")
# Functions that take tensors of several devices: copies, and indices from the host.
_ACROSS = {Tensor.copy_, Tensor.to, Tensor.cpu, Tensor.data_ptr}
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_}
_GET_DEVICE = Tensor.device.__get__
# Reads of memory that only the host's tensors have.
_HOST_ONLY: set[Any] = {Tensor.numpy, Tensor.__array__}


class DevicesDiffer(AssertionError):
    """An operation on tensors of several devices, which torch refuses."""


class TwoDevices(TorchFunctionMode):
    """Lets tensors lie on devices that are not there, and refuses operations on tensors of several.

    A tensor made with `device="cuda:1"` is a tensor of the CPU with that label; results have the label of
    what they are computed from. Numbers are real, so that a model's answers can be compared. As in torch, a
    tensor without dimensions from the host goes with any device, and indices may be the host's.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on the CPU, and label what it returns."""
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func == _GET_DEVICE:
            return get_device(args[0])
        tensors = list(_find_tensors((*args, *kwargs.values())))
        device = self._find_device(func, tensors, args)
        args, kwargs, asked = _take_device(args, kwargs)
        out = func(*args, **kwargs)
        own = asked or device
        if func is Tensor.cpu:
            own = HOST
        elif func in (Tensor.copy_, Tensor.__setitem__):
            own = get_device(args[0])
        if asked is not None and tensors and asked != get_device(tensors[0]):
            # As a copy to another device.
            out = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, out)
        return tree_map(lambda each: _label(each, own), out)

    def _find_device(
        self, func: Callable[..., Any], tensors: Sequence[Tensor], args: Sequence[Any]
    ) -> torch.device:
        """Find the device of an operation. Raises DevicesDiffer."""
        if func in _HOST_ONLY and any(get_device(each) != HOST for each in tensors):
            raise DevicesDiffer(f"{func} reads a tensor of {get_device(tensors[0])} on the host")
        if func in _ACROSS:
            return get_device(tensors[0]) if tensors else HOST
        found = {get_device(each) for each in tensors if each.dim()}
        if not found:
            found = {get_device(each) for each in tensors}
            found = found - {HOST} or found
        if func in _INDEXED and isinstance(args[0], Tensor):
            found = {get_device(args[0]), *(found - {HOST})}
        if len(found) > 1:
            name = getattr(func, "__name__", func)
            raise DevicesDiffer(f"{name} on {', '.join(sorted(map(str, found)))}")
        return next(iter(found), HOST)


def _find_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _find_tensors(each)


def get_device(tensor: Tensor) -> torch.device:
    """Read a tensor's label; one without lies on the host."""
    with torch._C.DisableTorchFunction():
        device: torch.device = getattr(tensor, "labelled_device", HOST)
        return device


def _label(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor) and (device != HOST or get_device(value) != HOST):
        with torch._C.DisableTorchFunction():
            value.labelled_device = device  # type: ignore[attr-defined]
    return value


def _take_device(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], torch.device | None]:
    """Take the device out of a call's arguments; returns them, and the device."""
    asked = None
    if kwargs.get("device") is not None:
        asked = torch.device(kwargs["device"])
        kwargs["device"] = HOST
    rest = list[Any]()
    for each in args:
        if isinstance(each, torch.device) or (isinstance(each, str) and _is_device(each)):
            asked, each = torch.device(each), HOST
        rest.append(each)
    return rest, kwargs, asked


def _is_device(text: str) -> bool:
    return text.split(":")[0] in ("cpu", "cuda")
