"""The weights of a layer, as the native code reads them."""

import ctypes
from typing import ClassVar

from workers.native.delta import DeltaLayer
from workers.native.weight import Weight


class Layer(ctypes.Structure):
    """Structure `Layer` of decode.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("delta", ctypes.POINTER(DeltaLayer)),
        ("queries", Weight),
        ("keys", Weight),
        ("values", Weight),
        ("out", Weight),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("mixer_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
    ]
