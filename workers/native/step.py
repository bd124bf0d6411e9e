"""The arguments of a decode step in native code."""

import ctypes
from typing import ClassVar

from workers.native.delta import DeltaStates
from workers.native.model import Model
from workers.native.searched import Searched


class Step(ctypes.Structure):
    """Structure `Step` of decode.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("model", ctypes.POINTER(Model)),
        ("stored", ctypes.POINTER(Searched)),
        ("layer_bytes", ctypes.c_int64),
        ("rotations", ctypes.c_int64),
        ("layer_rotation", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("row_positions", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("drawn", ctypes.c_void_p),
        ("most", ctypes.c_int64),
        ("sessions", ctypes.c_int64),
        ("states", ctypes.POINTER(DeltaStates)),
        ("scratch", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("attention_ns", ctypes.c_int64),
    ]
