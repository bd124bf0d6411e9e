"""The arguments of a call of the native code."""

import ctypes
from typing import ClassVar

from workers.native.heads import Heads
from workers.native.searched import Searched


class Call(ctypes.Structure):
    """Structure `Call` of attend.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("queries", Heads),
        ("keys", Heads),
        ("values", Heads),
        ("positions", Heads),
        ("mask", Heads),
        ("stored", ctypes.POINTER(Searched)),
        ("rotation", ctypes.c_int64),
        ("rotations", ctypes.c_int64),
        ("sessions", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("active", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
        ("all_heads", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("drawn", ctypes.c_void_p),
        ("most", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_size", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]
