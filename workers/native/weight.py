"""A matrix of a model, as the native code reads it."""

import ctypes
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # commands that look for the library import no torch
    from torch import Tensor


class Weight(ctypes.Structure):
    """Structure `Weight` of decode.cpp."""

    _fields_: ClassVar = [
        ("numbers", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("is_bfloat16", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, numbers: "Tensor", bias: "Tensor | None" = None) -> "Weight":
        """Of a contiguous `[outputs, inputs]` and a float32 `[outputs]`, which have to outlive this."""
        return cls(
            numbers.data_ptr(),
            None if bias is None else bias.data_ptr(),
            numbers.element_size() == 2,
            *numbers.shape,
        )
