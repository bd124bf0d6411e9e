"""A matrix of a model, as the native code reads it."""

import ctypes
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # commands that look for the library import no torch
    from workers.native.decoder_weights import Matrix

# Numbers of the formats in decode.cpp.
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}


class Weight(ctypes.Structure):
    """Structure `Weight` of decode.cpp."""

    _fields_: ClassVar = [
        ("numbers", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("format", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, matrix: "Matrix") -> "Weight":
        """Of a matrix, which has to outlive this."""
        bias, scales = (
            None if each is None else each.data_ptr() for each in (matrix.bias, matrix.scales)
        )
        return cls(matrix.numbers.data_ptr(), bias, scales, _FORMATS[matrix.format], *matrix.shape)
