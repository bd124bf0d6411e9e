"""Delta nets, as the native code reads them: structures of delta.h, which says what each field is."""

import ctypes
from typing import ClassVar

from workers.native.weight import Weight


class DeltaShape(ctypes.Structure):
    """What the delta nets of a model have in common; zeros without any."""

    _fields_: ClassVar = [
        ("key_heads", ctypes.c_int64),
        ("value_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


class DeltaLayer(ctypes.Structure):
    """The weights of a delta net."""

    _fields_: ClassVar = [
        ("mixed", Weight),
        ("gates", Weight),
        ("strengths", Weight),
        ("decays", Weight),
        ("out", Weight),
        ("kernel", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
    ]


class DeltaStates(ctypes.Structure):
    """The states of a delta net, which the native code changes."""

    _fields_: ClassVar = [("inputs", ctypes.c_void_p), ("sums", ctypes.c_void_p)]
