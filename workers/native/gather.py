"""The arguments of a copy of rows in native code."""

import ctypes
from typing import ClassVar


class Gather(ctypes.Structure):
    """Structure `Gather` of attend.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        ("part", ctypes.c_int64),
        ("page_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]
