"""An accelerator where there is none: marked CPU tensors, checked as torch checks devices.

A tensor made "on" `ACCELERATOR` inside the mode is an ordinary CPU tensor with a mark; operations
mark their results, and raise DeviceMismatch where torch would refuse the devices of the operands.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ACCELERATOR = torch.device("cuda")
_CPU = torch.device("cpu")
_MARK = "_is_on_the_accelerator"
_COPIES: set[Any] = {Tensor.copy_}  # between any two devices
_INDEXED: set[Any] = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_}
_IS_CUDA: Any = Tensor.is_cuda
_TO_HOST: set[Any] = {Tensor.numpy, Tensor.__array__}
_WAITING: set[Any] = {
    Tensor.cpu,
    Tensor.item,
    Tensor.tolist,
    Tensor.nonzero,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__bool__,
}


class DeviceMismatch(AssertionError):
    """Operands on several devices, as torch refuses them."""


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor counts as being on."""
    return ACCELERATOR if getattr(tensor, _MARK, False) else _CPU


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Mark a tensor as being on a device."""
    setattr(tensor, _MARK, device.type == ACCELERATOR.type)
    return tensor


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def move_module(module: nn.Module) -> None:
    """Mark all weights of a module as being on the accelerator."""
    for tensor in (*module.parameters(), *module.buffers()):
        put(tensor, ACCELERATOR)


class AcceleratorMode(TorchFunctionMode):
    """Runs torch functions on the CPU, and checks the devices that their operands count as on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return device_of(args[0])
        if func == _IS_CUDA.__get__:
            return device_of(args[0]) == ACCELERATOR
        if func in (Tensor.cpu, Tensor.cuda, Tensor.to):
            return _move(func, args, kwargs)
        if func in _TO_HOST and device_of(args[0]) == ACCELERATOR:
            raise DeviceMismatch(f"{func.__name__} of a tensor on the accelerator")
        requested = kwargs.get("device")
        if requested is not None:
            kwargs["device"] = _CPU
        device = _common_device(func, args, kwargs)
        result = func(*args, **kwargs)
        if not _is_in_place(func):
            for tensor in _tensors([result]):
                put(tensor, device if requested is None else torch.device(requested))
        return result


class WaitCounter(AcceleratorMode):
    """Records the calls that wait for the accelerator: copies from it, and blocking ones to it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        before = [device_of(tensor) for tensor in args[:1] if isinstance(tensor, Tensor)]
        result = super().__torch_function__(func, types, args, kwargs)
        to_it = func == torch.tensor and given.get("device") == ACCELERATOR
        if func == Tensor.to and before == [_CPU] and not given.get("non_blocking"):
            to_it = device_of(result) == ACCELERATOR
        # A number put at a mask is filled in; all else counts the mask's rows first.
        masked = (func in _INDEXED and not isinstance(args[-1], float)) and any(
            index.dtype == torch.bool and device_of(index) == ACCELERATOR
            for index in _tensors([args[1]])
        )
        if to_it or masked or (func in _WAITING and before == [ACCELERATOR]):
            self.waits.append(func.__name__)
        return result


def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy a tensor to the device that a call of `to`, `cpu` or `cuda` names."""
    tensor = args[0]
    device = {Tensor.cpu: _CPU, Tensor.cuda: ACCELERATOR}.get(func)
    rest = list(args[1:])
    for index, each in enumerate(rest):
        if isinstance(each, Tensor):
            device = device_of(each)
            rest[index] = each.dtype
        elif isinstance(each, torch.device) or (isinstance(each, str) and each != "contiguous"):
            device = torch.device(each)
            rest[index] = _CPU
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs["device"] = _CPU
    if device is None:
        device = device_of(tensor)
    moved = tensor if func is not Tensor.to else Tensor.to(tensor, *rest, **kwargs)
    if device == device_of(tensor):
        return put(moved, device)
    return put(moved.clone() if moved is tensor else moved, device)


def _common_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Device of the result. Raises DeviceMismatch."""
    operands = [*args, *kwargs.values()]
    if func in _COPIES:
        return device_of(args[0])
    if func in _INDEXED:
        return _indexed_device(func, operands)
    devices = {device_of(tensor) for tensor in _tensors(operands) if tensor.dim()}
    if len(devices) > 1:
        shapes = [(str(device_of(t)), tuple(t.shape)) for t in _tensors(operands)]
        raise DeviceMismatch(f"{getattr(func, '__name__', func)} of tensors on {shapes}")
    scalars = {device_of(tensor) for tensor in _tensors(operands)}
    return next(iter(devices or scalars), _CPU)


def _indexed_device(func: Any, operands: list[Any]) -> torch.device:
    """Indices may be on the CPU, or with the indexed tensor; so must values that are put there."""
    indexed = operands[0]
    indices = list(_tensors([operands[1]]))
    device = device_of(indexed)
    if device == _CPU and any(device_of(index) != _CPU and index.dim() for index in indices):
        raise DeviceMismatch(f"{func.__name__}: indices on the accelerator into a CPU tensor")
    values = [value for value in _tensors(operands[2:]) if value.dim()]
    # Without index tensors a value is copied, from any device.
    if indices and any(device_of(value) != device for value in values):
        raise DeviceMismatch(f"{func.__name__}: values on another device than the indexed tensor")
    return device


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
