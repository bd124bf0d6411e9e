"""The weights of a model, as the native code reads them."""

import ctypes
from typing import ClassVar

from workers.native.delta import DeltaShape
from workers.native.layer import Layer
from workers.native.weight import Weight


class Model(ctypes.Structure):
    """Structure `Model` of decode.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(Layer)),
        ("n_layers", ctypes.c_int64),
        ("row_layers", ctypes.c_int64),
        ("gated", ctypes.c_int64),
        ("delta", DeltaShape),
        ("embedding", Weight),
        ("head", Weight),
        ("norm", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("rotated", ctypes.c_int64),
        ("rotary_scale", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("head_epsilon", ctypes.c_float),
    ]
