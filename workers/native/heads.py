"""A tensor of all sessions and heads, as the native code reads it."""

import ctypes
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # commands that look for the library import no torch
    from torch import Tensor


class Heads(ctypes.Structure):
    """Structure `Heads` of attend.cpp."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("session_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, tensor: "Tensor") -> "Heads":
        """Of a tensor `[B, n_kv_heads, ...]`, which has to outlive this."""
        return cls(tensor.data_ptr(), *tensor.stride()[:2])
